"""The conformance kit: it plays the server over a real broker against any device agent, and says what the agent gets right.

It judges by what is seen on the wire and by exit codes alone. ``material`` are small bundles and what a round of them has to
give, ``play`` the broker, the agent's process and the scripted server, ``cases`` what is asked, ``vectors`` the bytes that a
reader in another language is tested with.
"""
