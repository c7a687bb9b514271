"""State of a run and its fleet, from the feed, the journal and the history in its folder."""
