"""Models: whatever turns a `Batch` into logits. `executor` is the seat, `loading` decides who sits in it."""
