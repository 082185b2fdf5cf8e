"""The Zarr store: staging, commit, manifest, reading."""
