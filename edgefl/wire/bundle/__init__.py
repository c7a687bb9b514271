"""What a tier downloads: manifest, archive, signature, sources of its nodes, and the profile it is measured by."""
