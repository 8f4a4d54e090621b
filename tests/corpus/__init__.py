"""A recorded corpus of what the server says on the wire, for changes of the code that must not change one
byte of it.

``python -m tests.corpus record FILE`` starts servers of this tree, sends them a fixed list of raw HTTP
requests and writes down every answer; ``compare FILE`` sends the same again and prints what differs. The
answers hold what the models computed, down to the last digit of a log-probability, and so depend on the
processor: a recording is made and compared on one machine and is not committed.

Nothing here knows the server's code: it is started by its command line and asked over HTTP, also where it
lies in another tree (``--server-root``). Nothing outside this package is imported, the models of random
weights included, so that a recording stays comparable whatever else in tests/ changes.
"""
