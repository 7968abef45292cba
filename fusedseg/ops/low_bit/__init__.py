"""Storage of a kept tensor in 8 or 4 bits a value, with exact signs."""
