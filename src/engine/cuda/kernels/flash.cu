// What the tensor-core attention kernels share: tiles of rows of one head in shared memory, and which keys a
// query row sees.
//
// A tile of queries packs the heads that share keys: tile row r is query row r / GROUP and head r % GROUP of
// the group, so that keys and values are fetched once for the whole group.
//
// Compiled with DIM (head size), GROUP (query heads of a key head), WARPS, and the tile sizes named in each
// kernel's file.

// Products go through warpgroups where WARPGROUP is 1 (Hopper; TILES is 1), else through each warp's own.

#ifndef TILES
#define TILES 1
#endif
#define THREADS (WARPS * 32)
#ifndef RESIDENT
#define RESIDENT 1  // thread blocks of a multiprocessor that registers must suffice for
#endif
#define CHUNKS (DIM / 8)  // 16-byte pieces of a tile's row

// Piece `chunk` of row `row` of a tile of ROWS rows: panels of 64 elements, the pieces of a row permuted so
// that eight rows never meet in one bank, and as the tensor cores expect them.
template <int ROWS>
__device__ __forceinline__ shared_address piece(shared_address tile, int row, int chunk) {
    return tile + chunk / 8 * (ROWS * 128) + row * 128 + (((chunk ^ row) & 7) << 4);
}

// Rows first.. of a head to a tile of ROWS rows; rows from `limit` on are zeros. A thread takes the same piece
// of every STEP-th row; the permutation repeats every 8 rows, so both its addresses advance by constants.
template <int ROWS>
__device__ __forceinline__ void load_keys(shared_address tile, const bf16* from, i64 stride, int first, int limit) {
    const int STEP = THREADS / CHUNKS, WHOLE = ROWS / STEP, REST = ROWS % STEP;
    static_assert(STEP % 8 == 0, "tile sizes");
    int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    shared_address to = piece<ROWS>(tile, row, chunk);
    const bf16* source = from + (i64)(first + row) * stride + chunk * 8;
    if (first + ROWS <= limit) {
#pragma unroll
        for (int i = 0; i < WHOLE; ++i) copy_async(to + i * STEP * 128, source + i * STEP * stride);
        if (REST && row < REST) copy_async(to + WHOLE * STEP * 128, source + WHOLE * STEP * stride);
    } else {
#pragma unroll
        for (int i = 0; i < WHOLE + (REST > 0); ++i) {
            if (REST && i == WHOLE && row >= REST) break;
            bool valid = first + row + i * STEP < limit;
            copy_async(to + i * STEP * 128, valid ? source + i * STEP * stride : from, valid);
        }
    }
}

// Query rows first.. of a group's heads to a tile of ROWS rows; rows from `limit` on are zeros.
template <int ROWS>
__device__ __forceinline__ void load_queries(shared_address tile, const bf16* from, i64 stride, int first,
                                             int limit) {
    const int STEP = THREADS / CHUNKS, WIDE = ROWS / GROUP;
    static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "tile sizes");
    int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    shared_address to = piece<ROWS>(tile, row, chunk);
    from += chunk * 8;
    if (STEP % GROUP == 0 && ROWS % GROUP == 0 && first + WIDE <= limit) {
        const bf16* source = from + (i64)(first + row / GROUP) * stride + row % GROUP * DIM;
#pragma unroll
        for (int i = 0; i < ROWS / STEP; ++i) copy_async(to + i * STEP * 128, source + i * (STEP / GROUP) * stride);
    } else {
#pragma unroll
        for (int i = 0; i < ROWS / STEP; ++i) {
            int r = row + i * STEP, query = first + r / GROUP;
            bool valid = r < WIDE * GROUP && query < limit;
            copy_async(to + i * STEP * 128, valid ? from + query * stride + r % GROUP * DIM : from, valid);
        }
    }
}

// Each warp holds 16 TILES rows of a product; `sums` are its 16x8 parts. Products are issued after
// start_products and done after finish_products, which name the sums that they touch.

#if WARPGROUP

template <int N>
__device__ __forceinline__ void settle_all(float (&sums)[1][N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) settle(sums[0][n][i]);
}
template <typename... Sums>
__device__ __forceinline__ void start_products(Sums&... sums) {
    (settle_all(sums), ...);
    products_begin();
}
// The sums are complete here, not later: what waits behind must not be waited for before.
template <typename... Sums>
__device__ __forceinline__ void hold(Sums&... sums) {
    (settle_all(sums), ...);
}
// Ends a group of products; LEFT groups may go on while the sums of earlier ones are used.
__device__ __forceinline__ void commit_products() { products_commit(); }
template <int LEFT, typename... Sums>
__device__ __forceinline__ void finish_products(Sums&... sums) {
    products_wait<LEFT>();
    (settle_all(sums), ...);
}
// After copies to shared memory arrived, before the barrier.
__device__ __forceinline__ void publish_tiles() { publish_shared(); }

// sums = rows of `left` times rows of `right`, over the head's dims.
template <int LEFT, int RIGHT>
__device__ __forceinline__ void multiply_tiles(float (&sums)[1][RIGHT / 8][4], shared_address left,
                                               shared_address right) {
    shared_address rows = left + threadIdx.x / 128 * 64 * 128;
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step)
        multiply_rows(sums[0], describe(rows + step / 4 * (LEFT * 128) + step % 4 * 32, 0),
                      describe(right + step / 4 * (RIGHT * 128) + step % 4 * 32, 0), step > 0);
}

// sums += parts times `right`, whose rows are summed over.
template <int RIGHT>
__device__ __forceinline__ void add_product(float (&sums)[1][DIM / 8][4], const u32 (&parts)[1][RIGHT / 16][4],
                                            shared_address right) {
#pragma unroll
    for (int step = 0; step < RIGHT / 16; ++step)
        multiply_columns(sums[0], parts[0][step], describe(right + step * 16 * 128, RIGHT * 128));
}

#else

template <typename... Sums>
__device__ __forceinline__ void start_products(Sums&...) {}
template <typename... Sums>
__device__ __forceinline__ void hold(Sums&...) {}
__device__ __forceinline__ void commit_products() {}
template <int LEFT, typename... Sums>
__device__ __forceinline__ void finish_products(Sums&...) {}
__device__ __forceinline__ void publish_tiles() {}

template <int LEFT, int RIGHT>
__device__ __forceinline__ void multiply_tiles(float (&sums)[TILES][RIGHT / 8][4], shared_address left,
                                               shared_address right) {
    int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16 * TILES;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int n = 0; n < RIGHT / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[t][n][i] = 0.f;
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        u32 a[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
            load_matrices(a[t], piece<LEFT>(left, row + t * 16 + (lane & 15), step * 2 + (lane >> 4)));
#pragma unroll
        for (int n = 0; n < RIGHT / 16; ++n) {
            u32 b[4];
            load_matrices(b, piece<RIGHT>(right, n * 16 + (lane & 7) + (lane >> 4) * 8, step * 2 + (lane >> 3 & 1)));
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                multiply_add(sums[t][2 * n], a[t], b[0], b[1]);
                multiply_add(sums[t][2 * n + 1], a[t], b[2], b[3]);
            }
        }
    }
}

template <int RIGHT>
__device__ __forceinline__ void add_product(float (&sums)[TILES][DIM / 8][4],
                                            const u32 (&parts)[TILES][RIGHT / 16][4], shared_address right) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 0; step < RIGHT / 16; ++step)
#pragma unroll
        for (int d = 0; d < DIM / 16; ++d) {
            u32 b[4];
            load_matrices_transposed(b, piece<RIGHT>(right, step * 16 + (lane & 15), d * 2 + (lane >> 4)));
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                multiply_add(sums[t][2 * d], parts[t][step], b[0], b[1]);
                multiply_add(sums[t][2 * d + 1], parts[t][step], b[2], b[3]);
            }
        }
}

#endif

// Sums of a product, rounded, as the left operand of the next one: the layouts agree.
template <int COLUMNS>
__device__ __forceinline__ void to_parts(u32 (&parts)[TILES][COLUMNS / 16][4],
                                         const float (&sums)[TILES][COLUMNS / 8][4]) {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                parts[t][n][2 * i] = pack_bf16(sums[t][2 * n + i][0], sums[t][2 * n + i][1]);
                parts[t][n][2 * i + 1] = pack_bf16(sums[t][2 * n + i][2], sums[t][2 * n + i][3]);
            }
}

__device__ __forceinline__ void clear(float (&sums)[TILES][DIM / 8][4]) {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int d = 0; d < DIM / 8; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[t][d][i] = 0.f;
}

// The key rows that a query row sees.
struct Range {
    int begin, end;

    __device__ bool holds(int key) const { return (u32)(key - begin) < (u32)(end - begin); }
};

__device__ __forceinline__ int later(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int earlier(int a, int b) { return a < b ? a : b; }

// What a tile of query rows sees: some of them any key of begin..end, all of them those of all_begin..all_end.
struct Span {
    int begin, end, all_begin, all_end;

    __device__ int tiles(int keys) const { return end > begin ? (end - begin + keys - 1) / keys : 0; }
    __device__ bool cuts(int key0, int keys) const { return key0 < all_begin || key0 + keys > all_end; }
};

// The masks of DFlash attention (arXiv 2602.06036) for rows of the blocks.
struct Blocks {
    const u32 *context_start, *anchor;
    int block, window;

    // Context rows that row `offset` of block n sees: those before the anchor.
    __device__ Range context_of(int n, int offset) const {
        int start = context_start[n], position = anchor[n];
        Range r = {start, start + position};
        if (window) r.begin = earlier(r.end, start + later(0, position + offset + 1 - window));
        return r;
    }
    __device__ Range context(int row) const { return context_of(row / block, row % block); }
    __device__ Span context(int first, int last) const {
        Span s = {0x7fffffff, 0, 0, 0x7fffffff};
        for (int n = first / block; n <= (last - 1) / block; ++n) {
            // A window's begin moves with the row.
            Range low = context_of(n, later(first - n * block, 0));
            Range high = context_of(n, earlier(last - n * block, block) - 1);
            if (low.begin < low.end) s.begin = earlier(s.begin, low.begin), s.end = later(s.end, low.end);
            s.all_begin = later(s.all_begin, high.begin), s.all_end = earlier(s.all_end, high.end);
        }
        return s;
    }

    // Block rows that a row sees: its own block's.
    __device__ Range own(int row) const {
        Range r;
        r.begin = row / block * block, r.end = r.begin + block;
        if (window) r.begin = later(r.begin, row + 1 - window), r.end = row + 1;
        return r;
    }
    __device__ Span own(int first, int last) const {
        Range low = own(first), high = own(last - 1);
        return {low.begin, high.end, high.begin, low.end};
    }
};
