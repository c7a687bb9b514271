"""ExecuTorch programs: decompositions, passes, writer and checks."""
