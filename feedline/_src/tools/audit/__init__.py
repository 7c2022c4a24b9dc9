"""Checks on a user's own data that a feed delivers the same rows anywhere, each once, also after a kill.

A map::

    layouts    the numbers of processes, meshes and options with which the feed is tried                   pure
    digest     a number for each row; the digests of a row's columns add up to that of the row             pure
    observed   what one process observed; combines all processes to global batches                         pure
    positions  the epoch and position of each row, computed without feedline's schedule                    pure
    verdict    compares one layout with the layout on one device                                           pure
    report     the verdicts as a table, and as JSON
    results    starts the processes of each launch, and collects what they observed
      job        the files and lines by which the audit and its processes communicate
      process    the main function of each process
      target     the function that makes the user's feed
      feeds      the feed, built with the options of a layout
      coverage   checks that each row comes once an epoch, with the values of the source
      faults     faults that the audit must find
"""
