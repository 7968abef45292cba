"""The option "bits": what forward keeps in 8 or 4 bits a value."""
