"""Objects in stores on the network, read ahead in blocks that a cache on local disk keeps."""
