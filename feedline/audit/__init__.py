"""Whether a feed keeps its promises on a user's own data: the same rows anywhere, each once, also after a kill.

A map::

    layouts    on how many processes and meshes the feed runs, with which options, and what resumes what   pure
    digest     a number for each row, which adds up over the columns that devices hold                     pure
    held       what one process held, and the global batches put together from all of them                 pure
    places     at which epoch and position each row of a run stands                                        pure
    verdict    one layout against the run on one device                                                    pure
    report     the verdicts as a table, and as JSON
    runs       starts the processes of each launch, and gathers what they held
      job        what they are told, and how they answer
      process    what each of them does
      feeds      the feed of a layout
      census     that every row comes once an epoch, and is the source's own
      plant      faults, to see that they are found
"""
