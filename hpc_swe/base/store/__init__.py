"""Put things on the shared file system, without knowing what they mean; all of it may raise StorageError."""
