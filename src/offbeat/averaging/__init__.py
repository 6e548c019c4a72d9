"""When weights are averaged, and with whom: periodically, by gossip, in the background."""
