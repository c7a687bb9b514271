"""What every room agrees on: named tensors, a program and its functions, what the server keeps, ranges of options."""
