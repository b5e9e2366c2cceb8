"""The data types shared by all packages: frozen, torch-free and JSON-serializable."""
