// What the tensor-core attention kernels share: tiles of rows of one head in shared memory, and which keys a
// query row sees.
//
// A tile of queries packs the heads that share keys: tile row r is query row r / group and head r % group of
// the group, so that keys and values are fetched once for the whole group.
//
// Compiled with DIM (head size), WARPS, and the tile sizes named in each kernel's file.

#define THREADS (WARPS * 32)
#define CHUNKS (DIM / 8)  // 16-byte pieces of a tile's row

// Piece `chunk` of row `row`; the pieces of a row are permuted so that eight rows never meet in one bank.
__device__ __forceinline__ shared_address piece(shared_address tile, int row, int chunk) {
    return tile + row * (DIM * 2) + ((chunk ^ (row & 7)) << 4);
}

// Rows first.. of a head to a tile of ROWS rows; rows from `limit` on are zeros.
template <int ROWS>
__device__ __forceinline__ void load_keys(shared_address tile, const bf16* from, i64 stride, int first, int limit) {
#pragma unroll
    for (int i = 0; i < (ROWS * CHUNKS + THREADS - 1) / THREADS; ++i) {
        int at = i * THREADS + threadIdx.x;
        if (ROWS * CHUNKS % THREADS && at >= ROWS * CHUNKS) break;
        int row = at / CHUNKS, chunk = at % CHUNKS;
        bool valid = first + row < limit;
        copy_async(piece(tile, row, chunk), from + (valid ? first + row : 0) * stride + chunk * 8, valid);
    }
}

// Query rows first.. of a group's heads to a tile of ROWS rows; rows from `limit` on are zeros.
template <int ROWS>
__device__ __forceinline__ void load_queries(shared_address tile, const bf16* from, i64 stride, int first, int limit,
                                             int group) {
    int used = ROWS / group * group;
#pragma unroll
    for (int i = 0; i < (ROWS * CHUNKS + THREADS - 1) / THREADS; ++i) {
        int at = i * THREADS + threadIdx.x;
        if (ROWS * CHUNKS % THREADS && at >= ROWS * CHUNKS) break;
        int row = at / CHUNKS, chunk = at % CHUNKS, query = first + row / group;
        bool valid = row < used && query < limit;
        const bf16* head = from + (valid ? query : 0) * stride + row % group * DIM;
        copy_async(piece(tile, row, chunk), head + chunk * 8, valid);
    }
}

// A 16x16 part of a tile as the left operand of a product.
__device__ __forceinline__ void load_left(u32 (&a)[4], shared_address tile, int row, int step) {
    int lane = threadIdx.x & 31;
    load_matrices(a, piece(tile, row + (lane & 15), step * 2 + (lane >> 4)));
}

// Right operand whose columns are tile rows row..row + 16: b[0..2] for the first eight, b[2..4] for the rest.
__device__ __forceinline__ void load_right(u32 (&b)[4], shared_address tile, int row, int step) {
    int lane = threadIdx.x & 31;
    load_matrices(b, piece(tile, row + (lane & 7) + (lane >> 4) * 8, step * 2 + (lane >> 3 & 1)));
}

// Right operand whose summed index is the tile row, row..row + 16, and whose columns are the 16 dims of `step`.
__device__ __forceinline__ void load_right_rows(u32 (&b)[4], shared_address tile, int row, int step) {
    int lane = threadIdx.x & 31;
    load_matrices_transposed(b, piece(tile, row + (lane & 15), step * 2 + (lane >> 4)));
}

// The key rows that a query row sees.
struct Range {
    int begin, end;
};

__device__ __forceinline__ int later(int a, int b) { return a > b ? a : b; }

// Context rows that row `row` of the blocks sees (arXiv 2602.06036): those before its block's anchor.
__device__ __forceinline__ Range context_range(int row, const u32* context_start, const u32* anchor, int block,
                                               int window) {
    int n = row / block, start = context_start[n], position = anchor[n] + row % block;
    Range r = {start, start + (int)anchor[n]};
    if (window) r.begin = start + later(0, position + 1 - window);
    if (r.begin > r.end) r.begin = r.end;
    return r;
}

// Block rows that it sees: its own block's.
__device__ __forceinline__ Range own_range(int row, int block, int window) {
    Range r;
    r.begin = row - row % block, r.end = r.begin + block;
    if (window) r.begin = later(r.begin, row + 1 - window), r.end = row + 1;
    return r;
}
