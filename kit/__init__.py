from kit.core import errors  # noqa: F401  (first: Ctrl-C while a command imports the rest)
