"""EAGLE"""
def default_aux_layers(n):
    return (2, n // 2, n - 3)
