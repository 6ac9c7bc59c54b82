"""How things are put on the shared file system, not what they mean; all of it may raise StorageError."""
