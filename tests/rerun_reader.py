"""What a rerun recording holds."""


def read_recording(path, unit_ns):
    """(static columns, timed columns with `time` in units of `unit_ns`) by entity, as rerun's own reader reads them."""
    from rerun.chunk import RrdReader

    static, timed = {}, {}
    for chunk in RrdReader(path).stream():
        batch = chunk.to_record_batch()
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if ":" in name}
        if not chunk.is_static:
            columns["time"] = [ns / unit_ns for ns in batch.column("time").cast("int64").to_pylist()]
        known = (static if chunk.is_static else timed).setdefault(chunk.entity_path, {})
        for name, values in columns.items():
            known.setdefault(name, []).extend(values)
    return static, timed
