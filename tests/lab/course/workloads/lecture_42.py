"""Compares up to twelve tokens."""


class MyProposer:
    def __init__(self, longest, shortest):
        pass

    def propose(self, token_ids, count):
        for length in range(12, 0, -1):
            tail = token_ids[-length:]
            for start in range(len(token_ids) - length - 1, -1, -1):
                if token_ids[start : start + length] == tail:
                    return token_ids[start + length : start + length + count]
        return []
