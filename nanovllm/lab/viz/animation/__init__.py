"""Traces as GIF files: `stage` is the frame that all share, `moments` and `beats` tell a trace in captions, a module a view
draws the frames, and the two `..._figures` modules have the stories of figures/."""
