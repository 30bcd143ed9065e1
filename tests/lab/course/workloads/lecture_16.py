"""Begins with 16. What is still missing, divided by the smallest probability so far, are the fewest
that are missing; at least twice as many are sorted next."""


def nucleus(largest, top_p):
    found = []
    for row, wanted in enumerate(top_p):
        width = 16
        while True:
            (values,) = largest([row], width)
            last = int((values.cumsum(0) < wanted).sum())
            if last < len(values):
                break
            missing = (wanted - float(values.sum())) / float(values[-1])
            width = max(2 * width, width + int(missing) + 1)
        found.append(float(values[last]))
    return found
