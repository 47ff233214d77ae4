"""S3 for real: a server over HTTP, and a proxy before it that goes wrong by a script."""
