"""Messages that nobody should send, against a server and an agent that run, while an honest round goes on."""
