"""Whether a feed keeps its promises on a user's own data: the same rows anywhere, each once, also after a kill.

A map::

    layouts    on how many processes and meshes the feed runs, and with which options     pure
    digest     a number for each row, which adds up over the columns that devices hold    pure
    held       what one process held, and global batches put together from all of them    pure
    places     at which (epoch, position) each row of a run stands                        pure
    verdict    one layout against the run on one device                                   pure
    runs       starts the processes of each count, with a time limit
    process    what each of them does
    census     that every row comes once an epoch, and is the source's own
    plant      faults, to see that they are found
    report     the verdict as a table, and as JSON
"""
