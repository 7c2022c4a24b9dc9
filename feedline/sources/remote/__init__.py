"""Rows of arrays and of Arrow files in stores."""
