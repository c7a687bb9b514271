package org.edgefl;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;

/** Local data, row by row: samples {@code x}, labels {@code y}, and what a model reads beside them. */
public abstract class DataSource {
    private final String name;
    private final long rows;
    private final List<String> arrays = new ArrayList<>();
    private final List<String> types = new ArrayList<>();
    private final List<long[]> shapes = new ArrayList<>();

    /** {@code name} is for people: "photos". */
    protected DataSource(String name, long rows) {
        this.name = name;
        this.rows = rows;
    }

    /** One array more: its name, numpy's name of its type ("uint8", "float32", "int64"), and the shape of one row. */
    protected final void array(String array, String type, long... shape) {
        arrays.add(array);
        types.add(type);
        shapes.add(shape.clone());
    }

    /**
     * Writes row {@code row} of array number {@code array}, in the order in which they were declared, into {@code into}: all that
     * remains, in C order and the machine's byte order, which the buffer has. It is called in a thread of the agent, never twice at
     * once, also many times for one row; equal rows give equal bytes within a round.
     *
     * @throws Exception if the row cannot be read: the round is declined.
     */
    protected abstract void read(int array, long row, ByteBuffer into) throws Exception;

    void give(long handle) {
        Native.setData(handle, Native.utf8(name), rows, Native.utf8(arrays), Native.utf8(types), shapes.toArray(new long[0][]), this);
    }
}
