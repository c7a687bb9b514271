"""Who may read and write which topic, in the words of several brokers; and the certificates of a lab's own broker."""
