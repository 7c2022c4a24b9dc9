"""Rows of arrays, Arrow files, Zarr folders and folders of files in stores."""
