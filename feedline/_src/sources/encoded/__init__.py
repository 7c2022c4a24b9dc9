"""Records of bytes of any length with random access: files of a folder, and records in files of many."""
