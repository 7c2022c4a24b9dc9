"""`feedline audit`: runs a user's feed in many layouts, also after a kill, and compares each row with one device.

A map::

    command   the command line, the table and JSON
    layouts   the numbers of processes, meshes and options with which the feed is tried         pure
    launches  starts the processes of each launch, and collects what they observed
    process   the main function of each process
    coverage  checks that each row comes once an epoch, with the values of the source
    target    finds the function that makes the user's feed, and builds the feed for a layout
    digest    a number for each row; the digests of a row's columns add up to that of the row   pure
    verdict   combines what the processes observed, and compares it with one device             pure
"""
