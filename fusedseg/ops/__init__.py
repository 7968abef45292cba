"""The ops, a folder each, with schema, aten body, Triton implementation, fake and backward; and what they share."""
