"""Files and objects, each with a size and a version: on local disk, or in a store, with a cache on local disk."""
