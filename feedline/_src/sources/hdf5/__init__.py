"""HDF5 files: h5py finds where the data lies, and feedline reads it without the HDF5 library and its lock."""
