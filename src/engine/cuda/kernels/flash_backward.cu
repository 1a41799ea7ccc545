// Gradients of DFlash attention on tensor cores (arXiv 2307.08691). Scores are computed twice, once for the
// queries' gradient and once for the keys', so that each sum has one owner and one order: no atomics.

// ---- Gradient of the queries: one thread block for QUERIES tile rows, KEYS keys at a time, two stages.

#define QUERIES (WARPS * 16)

extern "C" __global__ void __launch_bounds__(THREADS)
    flash_dq(const bf16* d_out, i64 d_stride, const bf16* q, i64 q_stride, const bf16* k, i64 k_stride,
             const bf16* v, i64 v_stride, const bf16* own_k, i64 own_k_stride, const bf16* own_v, i64 own_v_stride,
             const float* lse, i64 lse_stride, const float* delta, bf16* dq, i64 dq_stride, u32 all_rows,
             const u32* context_start, const u32* anchor, u32 block, u32 window, u32 group, float scale) {
    extern __shared__ uint4 memory[];
    __shared__ int bounds[2][4];
    shared_address q_tile = address_of_shared(memory);
    shared_address d_tile = q_tile + QUERIES * DIM * 2, key_tiles = d_tile + QUERIES * DIM * 2;
    const int STAGE = 2 * KEYS * DIM * 2;  // keys, then values
    const int WIDE = QUERIES / group;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv = blockIdx.y;
    int first = blockIdx.x * WIDE, limit = all_rows;

    load_queries<QUERIES>(q_tile, q + (i64)kv * group * DIM, q_stride, first, limit, group);
    load_queries<QUERIES>(d_tile, d_out + (i64)kv * group * DIM, d_stride, first, limit, group);
    copies_commit();

    Range seen[2][2];
    float base[2], shift[2];
    if (threadIdx.x < 8) bounds[threadIdx.x / 4][threadIdx.x % 4] = threadIdx.x % 2 ^ threadIdx.x / 2 % 2 ? 0 : 0x7fffffff;
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        int r = warp * 16 + t * 8 + lane / 4, row = first + r / group;
        bool valid = r / group < WIDE && row < limit;
        i64 head = (i64)kv * group + r % group;
        float l = valid ? lse[row * lse_stride + head] : -INFINITE;
        // A row that sees nothing gets probability 0 everywhere.
        base[t] = l == -INFINITE ? INFINITE : l * LOG2E;
        shift[t] = valid ? delta[head * all_rows + row] : 0.f;
#pragma unroll
        for (int kind = 0; kind < 2; ++kind) {
            Range range = {0, 0};
            if (valid) {
                range = kind ? own_range(row, block, window)
                             : context_range(row, context_start, anchor, block, window);
                if (lane % 4 == 0) {
                    int* b = bounds[kind];
                    if (range.begin < range.end) atomicMin(&b[0], range.begin), atomicMax(&b[1], range.end);
                    atomicMax(&b[2], range.begin), atomicMin(&b[3], range.end);
                }
            }
            seen[kind][t] = range;
        }
    }
    __syncthreads();
    int begin[2], tiles[2] = {0, 0};
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
        begin[kind] = bounds[kind][0];
        if (bounds[kind][1] > begin[kind]) tiles[kind] = (bounds[kind][1] - begin[kind] + KEYS - 1) / KEYS;
    }
    k += (i64)kv * DIM, v += (i64)kv * DIM, own_k += (i64)kv * DIM, own_v += (i64)kv * DIM;
    int all = tiles[0] + tiles[1];

    auto fetch = [&](int j) {
        shared_address to = key_tiles + j % 2 * STAGE;
        if (j >= tiles[0]) {
            int key0 = begin[1] + (j - tiles[0]) * KEYS;
            load_keys<KEYS>(to, own_k, own_k_stride, key0, bounds[1][1]);
            load_keys<KEYS>(to + STAGE / 2, own_v, own_v_stride, key0, bounds[1][1]);
        } else {
            int key0 = begin[0] + j * KEYS;
            load_keys<KEYS>(to, k, k_stride, key0, bounds[0][1]);
            load_keys<KEYS>(to + STAGE / 2, v, v_stride, key0, bounds[0][1]);
        }
    };

    float sums[DIM / 8][4];
#pragma unroll
    for (int d = 0; d < DIM / 8; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[d][i] = 0.f;
    float factor = scale * LOG2E;
    if (all) fetch(0);
    copies_commit();
    for (int j = 0; j < all; ++j) {
        if (j + 1 < all) fetch(j + 1);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        int kind = j >= tiles[0];
        int key0 = kind ? begin[1] + (j - tiles[0]) * KEYS : begin[0] + j * KEYS;
        shared_address k_tile = key_tiles + j % 2 * STAGE, v_tile = k_tile + STAGE / 2;

        float s[KEYS / 8][4], dp[KEYS / 8][4];
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] = dp[n][i] = 0.f;
#pragma unroll
        for (int step = 0; step < DIM / 16; ++step) {
            u32 a[4], d[4];
            load_left(a, q_tile, warp * 16, step);
            load_left(d, d_tile, warp * 16, step);
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                u32 b[4];
                load_right(b, k_tile, n * 16, step);
                multiply_add(s[2 * n], a, b[0], b[1]);
                multiply_add(s[2 * n + 1], a, b[2], b[3]);
                load_right(b, v_tile, n * 16, step);
                multiply_add(dp[2 * n], d, b[0], b[1]);
                multiply_add(dp[2 * n + 1], d, b[2], b[3]);
            }
        }
        bool masked = key0 < bounds[kind][2] || key0 + KEYS > bounds[kind][3];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            Range range = kind ? seen[1][t] : seen[0][t];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int key = key0 + n * 8 + lane % 4 * 2 + i, at = t * 2 + i;
                    float p = exp2_fast(s[n][at] * factor - base[t]);
                    if (masked && (key < range.begin || key >= range.end)) p = 0.f;
                    s[n][at] = p * (dp[n][at] - shift[t]);
                }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            u32 a[4] = {pack_bf16(s[2 * n][0], s[2 * n][1]), pack_bf16(s[2 * n][2], s[2 * n][3]),
                        pack_bf16(s[2 * n + 1][0], s[2 * n + 1][1]), pack_bf16(s[2 * n + 1][2], s[2 * n + 1][3])};
#pragma unroll
            for (int d = 0; d < DIM / 16; ++d) {
                u32 b[4];
                load_right_rows(b, k_tile, n * 16, d);
                multiply_add(sums[2 * d], a, b[0], b[1]);
                multiply_add(sums[2 * d + 1], a, b[2], b[3]);
            }
        }
        __syncthreads();
    }
    copies_wait<0>();
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        int r = warp * 16 + t * 8 + lane / 4, row = first + r / group;
        if (r / group >= WIDE || row >= limit) continue;
        bf16* to = dq + row * dq_stride + ((i64)kv * group + r % group) * DIM + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < DIM / 8; ++d)
            *(u32*)(to + d * 8) = pack_bf16(sums[d][t * 2] * scale, sums[d][t * 2 + 1] * scale);
    }
}

// ---- Gradients of keys and values: one thread block for WARPS x 16 key rows of the context or, past
// `context_tiles`, of the blocks; BATCH tile rows of queries at a time, two stages.

#define KEY_ROWS (WARPS * 16)

// What a tile of queries needs beside its matrices.
struct Queries {
    float base[BATCH], shift[BATCH];
    Range seen[BATCH];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    flash_dkv(const bf16* d_out, i64 d_stride, const bf16* q, i64 q_stride, const bf16* k, i64 k_stride,
              const bf16* v, i64 v_stride, const bf16* own_k, i64 own_k_stride, const bf16* own_v, i64 own_v_stride,
              const float* lse, i64 lse_stride, const float* delta, bf16* dk, i64 dk_stride, bf16* dv,
              i64 dv_stride, bf16* own_dk, i64 own_dk_stride, bf16* own_dv, i64 own_dv_stride, u32 context_rows,
              u32 context_tiles, u32 all_rows, const u32* context_start, const u32* anchor, u32 block, u32 window,
              u32 group, float scale) {
    extern __shared__ uint4 memory[];
    __shared__ Queries queries[2];
    __shared__ int blocks[2];
    const int STAGE = 2 * BATCH * DIM * 2;  // queries, then gradients of the output
    const int WIDE = BATCH / group;
    shared_address k_tile = address_of_shared(memory), v_tile = k_tile + KEY_ROWS * DIM * 2;
    shared_address stages = v_tile + KEY_ROWS * DIM * 2;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv = blockIdx.y;
    bool is_own = blockIdx.x >= context_tiles;
    int key0 = (is_own ? blockIdx.x - context_tiles : blockIdx.x) * KEY_ROWS;
    int key_limit = is_own ? all_rows : context_rows;
    if (is_own) {
        k = own_k, k_stride = own_k_stride, v = own_v, v_stride = own_v_stride;
        dk = own_dk, dk_stride = own_dk_stride, dv = own_dv, dv_stride = own_dv_stride;
    }
    load_keys<KEY_ROWS>(k_tile, k + (i64)kv * DIM, k_stride, key0, key_limit);
    load_keys<KEY_ROWS>(v_tile, v + (i64)kv * DIM, v_stride, key0, key_limit);
    copies_commit();

    // The blocks that see any of these keys: their query rows are first..last.
    int key_end = key0 + KEY_ROWS < key_limit ? key0 + KEY_ROWS : key_limit, first, last;
    if (is_own) {
        first = key0 / (int)block * block;
        last = (key_end + (int)block - 1) / (int)block * block;
    } else {
        if (threadIdx.x == 0) blocks[0] = 0x7fffffff, blocks[1] = 0;
        __syncthreads();
        for (int n = threadIdx.x; n < (int)(all_rows / block); n += THREADS) {
            int start = context_start[n], end = start + anchor[n];
            if (window) start += later(0, (int)anchor[n] + 1 - (int)window);
            if (start < key_end && end > key0) atomicMin(&blocks[0], n), atomicMax(&blocks[1], n + 1);
        }
        __syncthreads();
        first = blocks[1] ? blocks[0] * block : 0;
        last = blocks[1] * block;
    }
    q += (i64)kv * group * DIM, d_out += (i64)kv * group * DIM;

    auto fetch = [&](int row0, int stage) {
        shared_address to = stages + stage * STAGE;
        load_queries<BATCH>(to, q, q_stride, row0, last, group);
        load_queries<BATCH>(to + STAGE / 2, d_out, d_stride, row0, last, group);
        for (int r = threadIdx.x; r < BATCH; r += THREADS) {
            int row = row0 + r / group;
            bool valid = r / group < WIDE && row < last;
            i64 head = (i64)kv * group + r % group;
            float l = valid ? lse[row * lse_stride + head] : -INFINITE;
            queries[stage].base[r] = l == -INFINITE ? INFINITE : l * LOG2E;
            queries[stage].shift[r] = valid ? delta[head * all_rows + row] : 0.f;
            Range range = {0, 0};
            if (valid)
                range = is_own ? own_range(row, block, window)
                               : context_range(row, context_start, anchor, block, window);
            queries[stage].seen[r] = range;
        }
    };

    float sum_k[DIM / 8][4], sum_v[DIM / 8][4];
#pragma unroll
    for (int d = 0; d < DIM / 8; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum_k[d][i] = sum_v[d][i] = 0.f;
    float factor = scale * LOG2E;
    if (first < last) fetch(first, 0);
    copies_commit();
    int stage = 0;
    for (int row0 = first; row0 < last; row0 += WIDE, stage ^= 1) {
        if (row0 + WIDE < last) fetch(row0 + WIDE, stage ^ 1);
        copies_commit();
        copies_wait<1>();
        __syncthreads();
        shared_address q_tile = stages + stage * STAGE, d_tile = q_tile + STAGE / 2;
        const Queries& about = queries[stage];

        // Scores with keys as rows and queries as columns.
        float s[BATCH / 8][4], dp[BATCH / 8][4];
#pragma unroll
        for (int n = 0; n < BATCH / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] = dp[n][i] = 0.f;
#pragma unroll
        for (int step = 0; step < DIM / 16; ++step) {
            u32 a[4], d[4];
            load_left(a, k_tile, warp * 16, step);
            load_left(d, v_tile, warp * 16, step);
#pragma unroll
            for (int n = 0; n < BATCH / 16; ++n) {
                u32 b[4];
                load_right(b, q_tile, n * 16, step);
                multiply_add(s[2 * n], a, b[0], b[1]);
                multiply_add(s[2 * n + 1], a, b[2], b[3]);
                load_right(b, d_tile, n * 16, step);
                multiply_add(dp[2 * n], d, b[0], b[1]);
                multiply_add(dp[2 * n + 1], d, b[2], b[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < BATCH / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                int r = n * 8 + lane % 4 * 2 + c;
                float base = about.base[r], shift = about.shift[r];
                Range range = about.seen[r];
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    int key = key0 + warp * 16 + t * 8 + lane / 4, at = t * 2 + c;
                    float p = exp2_fast(s[n][at] * factor - base);
                    if (key < range.begin || key >= range.end) p = 0.f;
                    s[n][at] = p;
                    dp[n][at] = p * (dp[n][at] - shift);
                }
            }
#pragma unroll
        for (int n = 0; n < BATCH / 16; ++n) {
            u32 a[4] = {pack_bf16(s[2 * n][0], s[2 * n][1]), pack_bf16(s[2 * n][2], s[2 * n][3]),
                        pack_bf16(s[2 * n + 1][0], s[2 * n + 1][1]), pack_bf16(s[2 * n + 1][2], s[2 * n + 1][3])};
            u32 d[4] = {pack_bf16(dp[2 * n][0], dp[2 * n][1]), pack_bf16(dp[2 * n][2], dp[2 * n][3]),
                        pack_bf16(dp[2 * n + 1][0], dp[2 * n + 1][1]), pack_bf16(dp[2 * n + 1][2], dp[2 * n + 1][3])};
#pragma unroll
            for (int e = 0; e < DIM / 16; ++e) {
                u32 b[4];
                load_right_rows(b, d_tile, n * 16, e);
                multiply_add(sum_v[2 * e], a, b[0], b[1]);
                multiply_add(sum_v[2 * e + 1], a, b[2], b[3]);
                load_right_rows(b, q_tile, n * 16, e);
                multiply_add(sum_k[2 * e], d, b[0], b[1]);
                multiply_add(sum_k[2 * e + 1], d, b[2], b[3]);
            }
        }
        __syncthreads();
    }
    copies_wait<0>();
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        int key = key0 + warp * 16 + t * 8 + lane / 4;
        if (key >= key_limit) continue;
        bf16* to_k = dk + key * dk_stride + (i64)kv * DIM + lane % 4 * 2;
        bf16* to_v = dv + key * dv_stride + (i64)kv * DIM + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < DIM / 8; ++d) {
            *(u32*)(to_k + d * 8) = pack_bf16(sum_k[d][t * 2] * scale, sum_k[d][t * 2 + 1] * scale);
            *(u32*)(to_v + d * 8) = pack_bf16(sum_v[d][t * 2], sum_v[d][t * 2 + 1]);
        }
    }
}
