"""Connection to the federation: blobs that come in, updates that go out."""
