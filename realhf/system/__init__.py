"""The processes: master worker, model worker, their channel, the row store, what a run shows and writes."""
