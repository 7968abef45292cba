"""The ops.  Each folder holds the schema, aten body, Triton implementation, fake and backward of its ops.

The files beside the folders hold code that several ops share.
"""
