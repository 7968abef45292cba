"""The ops: one file each, with its schema, aten body, Triton implementation, fake and backward."""
