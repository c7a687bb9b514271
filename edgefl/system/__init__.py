"""What processes ask of the machine they run on: whole files, sizes as text, an end with their parent."""
