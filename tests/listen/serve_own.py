"""Serves a feed's metrics in each process of a run, and prints what a scrape of its own server finds."""

import urllib.request

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline._src.listen.prometheus import serve

if __name__ == "__main__":
    feedline.cluster.initialize()
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with feedline.Feed({"x": np.zeros((640, 2))}, 64, sharding) as feed, serve(feed, port=0) as server:
        for _, _ in zip(range(20), feed, strict=False):
            pass
        text = urllib.request.urlopen(server.url).read().decode()
        print([line for line in text.splitlines() if line.startswith(("feedline_rows", "feedline_placed"))])
