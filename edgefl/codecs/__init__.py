"""How an update becomes bytes: codecs, pure functions traced into the algorithm's ``finish``, and the form of what they
send.

``form`` describes the bytes and imports no torch; ``decode`` reads them; the server adds them up without decoding.
"""
