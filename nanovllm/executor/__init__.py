"""Who runs the ranks of an engine, and how a step's plan reaches them: in this process, in several, on several machines."""
