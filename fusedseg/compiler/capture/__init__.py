"""Passes over the graph that Dynamo captures, before AOTAutograd traces it into aten ops."""
