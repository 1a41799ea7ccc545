// Attention forward on tensor cores, in tiles with a running softmax (arXiv 2307.08691). TILES 16-row tiles of
// queries a warp, KEYS keys at a time. BLOCKS chooses DFlash attention, else packed causal attention.

#define QUERIES (WARPS * 16 * TILES)

extern "C" __global__ void __launch_bounds__(THREADS)
    flash_forward(const bf16* q, i64 q_stride, const bf16* k, i64 k_stride, const bf16* v, i64 v_stride,
                  const bf16* own_k, i64 own_k_stride, const bf16* own_v, i64 own_v_stride, bf16* out,
                  i64 out_stride, float* lse, i64 lse_stride, u32 all_rows, const u32* offsets, const u32* anchor,
                  u32 block, u32 window, u32 group, float scale) {
    extern __shared__ uint4 memory[];
    __shared__ int bounds[2][4];  // of both kinds of keys: first seen, end of seen, and what all rows see
    __shared__ Range seen[1 + BLOCKS][QUERIES];
    shared_address q_tile = address_of_shared(memory);
    shared_address k_tile = q_tile + QUERIES * DIM * 2, v_tile = k_tile + KEYS * DIM * 2;
    const int WIDE = QUERIES / group;  // query rows of the tile
    const int KINDS = BLOCKS ? 2 : 1;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv = blockIdx.y;

#if BLOCKS
    int first = blockIdx.x * WIDE, limit = all_rows;
#else
    // The longest rows first, so that the last thread blocks to run are short ones.
    int start = offsets[blockIdx.z], limit = offsets[blockIdx.z + 1];
    int first = start + (gridDim.x - 1 - blockIdx.x) * WIDE;
#endif
    if (first >= limit) return;

    load_queries<QUERIES>(q_tile, q + (i64)kv * group * DIM, q_stride, first, limit, group);
    copies_commit();

    if (threadIdx.x < 8) bounds[threadIdx.x / 4][threadIdx.x % 4] = threadIdx.x % 2 ^ threadIdx.x / 2 % 2 ? 0 : 0x7fffffff;
    __syncthreads();
    for (int r = threadIdx.x; r < QUERIES; r += THREADS) {
        int row = first + r / group;
        bool valid = r / group < WIDE && row < limit;
#pragma unroll
        for (int kind = 0; kind < KINDS; ++kind) {
            Range range = {0, 0};
            if (valid) {
#if BLOCKS
                range = kind ? own_range(row, block, window) : context_range(row, offsets, anchor, block, window);
#else
                range.begin = window ? later(start, row + 1 - window) : start;
                range.end = row + 1;
#endif
                int* b = bounds[kind];
                if (range.begin < range.end) atomicMin(&b[0], range.begin), atomicMax(&b[1], range.end);
                atomicMax(&b[2], range.begin), atomicMin(&b[3], range.end);
            }
            seen[kind][r] = range;
        }
    }
    __syncthreads();
    int begin[2], tiles[2] = {0, 0};
#pragma unroll
    for (int kind = 0; kind < KINDS; ++kind) {
        begin[kind] = bounds[kind][0];
        if (bounds[kind][1] > begin[kind]) tiles[kind] = (bounds[kind][1] - begin[kind] + KEYS - 1) / KEYS;
    }
    k += (i64)kv * DIM, v += (i64)kv * DIM;
    if (BLOCKS) own_k += (i64)kv * DIM, own_v += (i64)kv * DIM;
    int all = tiles[0] + tiles[1];

    float sums[TILES][DIM / 8][4], top[TILES * 2], total[TILES * 2];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int d = 0; d < DIM / 8; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[t][d][i] = 0.f;
#pragma unroll
    for (int t = 0; t < TILES * 2; ++t) top[t] = -INFINITE, total[t] = 0.f;
    float factor = scale * LOG2E;

    if (all) {
        if (tiles[0]) load_keys<KEYS>(k_tile, k, k_stride, begin[0], bounds[0][1]);
        else load_keys<KEYS>(k_tile, own_k, own_k_stride, begin[1], bounds[1][1]);
        copies_commit();
    }
    for (int j = 0; j < all; ++j) {
        int kind = j >= tiles[0];
        int key0 = kind ? begin[1] + (j - tiles[0]) * KEYS : begin[0] + j * KEYS;
        if (kind) load_keys<KEYS>(v_tile, own_v, own_v_stride, key0, bounds[1][1]);
        else load_keys<KEYS>(v_tile, v, v_stride, key0, bounds[0][1]);
        copies_commit();
        copies_wait<1>();
        __syncthreads();

        float s[TILES][KEYS / 8][4];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[t][n][i] = 0.f;
#pragma unroll
        for (int step = 0; step < DIM / 16; ++step) {
            u32 a[TILES][4];
#pragma unroll
            for (int t = 0; t < TILES; ++t) load_left(a[t], q_tile, (warp * TILES + t) * 16, step);
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                u32 b[4];
                load_right(b, k_tile, n * 16, step);
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    multiply_add(s[t][2 * n], a[t], b[0], b[1]);
                    multiply_add(s[t][2 * n + 1], a[t], b[2], b[3]);
                }
            }
        }

        copies_wait<0>();
        __syncthreads();
        if (j + 1 < all) {
            int next = j + 1;
            if (next >= tiles[0])
                load_keys<KEYS>(k_tile, own_k, own_k_stride, begin[1] + (next - tiles[0]) * KEYS, bounds[1][1]);
            else
                load_keys<KEYS>(k_tile, k, k_stride, begin[0] + next * KEYS, bounds[0][1]);
            copies_commit();
        }

        if (key0 < bounds[kind][2] || key0 + KEYS > bounds[kind][3]) {
#pragma unroll
            for (int t = 0; t < TILES * 2; ++t) {
                Range range = seen[BLOCKS ? kind : 0][(warp * TILES + t / 2) * 16 + t % 2 * 8 + lane / 4];
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        int key = key0 + n * 8 + lane % 4 * 2 + i;
                        if (key < range.begin || key >= range.end) s[t / 2][n][t % 2 * 2 + i] = -INFINITE;
                    }
            }
        }
#pragma unroll
        for (int t = 0; t < TILES * 2; ++t) {
            float high = top[t];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
                high = fmaxf(high, fmaxf(s[t / 2][n][t % 2 * 2], s[t / 2][n][t % 2 * 2 + 1]));
            high = fmaxf(high, __shfl_xor_sync(FULL, high, 1));
            high = fmaxf(high, __shfl_xor_sync(FULL, high, 2));
            float base = high == -INFINITE ? 0.f : high * factor;
            float shrink = exp2_fast(top[t] * factor - base), sum = 0.f;
            top[t] = high;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float p = exp2_fast(s[t / 2][n][t % 2 * 2 + i] * factor - base);
                    s[t / 2][n][t % 2 * 2 + i] = p;
                    sum += p;
                }
            total[t] = total[t] * shrink + sum;
#pragma unroll
            for (int d = 0; d < DIM / 8; ++d) sums[t / 2][d][t % 2 * 2] *= shrink, sums[t / 2][d][t % 2 * 2 + 1] *= shrink;
        }
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n) {
            u32 a[TILES][4];
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                a[t][0] = pack_bf16(s[t][2 * n][0], s[t][2 * n][1]);
                a[t][1] = pack_bf16(s[t][2 * n][2], s[t][2 * n][3]);
                a[t][2] = pack_bf16(s[t][2 * n + 1][0], s[t][2 * n + 1][1]);
                a[t][3] = pack_bf16(s[t][2 * n + 1][2], s[t][2 * n + 1][3]);
            }
#pragma unroll
            for (int d = 0; d < DIM / 16; ++d) {
                u32 b[4];
                load_right_rows(b, v_tile, n * 16, d);
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    multiply_add(sums[t][2 * d], a[t], b[0], b[1]);
                    multiply_add(sums[t][2 * d + 1], a[t], b[2], b[3]);
                }
            }
        }
        __syncthreads();
    }
    copies_wait<0>();

#pragma unroll
    for (int t = 0; t < TILES * 2; ++t) {
        float sum = total[t];
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        int r = (warp * TILES + t / 2) * 16 + t % 2 * 8 + lane / 4, row = first + r / group;
        if (r / group >= WIDE || row >= limit) continue;
        i64 head = (i64)kv * group + r % group;
        float inverse = sum > 0.f ? 1.f / sum : 0.f;
        bf16* to = out + row * out_stride + head * DIM + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < DIM / 8; ++d)
            *(u32*)(to + d * 8) =
                pack_bf16(sums[t / 2][d][t % 2 * 2] * inverse, sums[t / 2][d][t % 2 * 2 + 1] * inverse);
        if (lse && lane % 4 == 0) lse[row * lse_stride + head] = sum > 0.f ? top[t] * scale + __logf(sum) : -INFINITE;
    }
}
