// Attention forward on tensor cores, in tiles with a running softmax (arXiv 2307.08691). TILES 16-row tiles of
// queries a warp, KEYS keys at a time in two stages. BLOCKS chooses DFlash attention, else packed causal
// attention.

#define QUERIES (WARPS * 16 * TILES)

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    flash_forward(const bf16* q, i64 q_stride, const bf16* k, i64 k_stride, const bf16* v, i64 v_stride,
                  const bf16* own_k, i64 own_k_stride, const bf16* own_v, i64 own_v_stride, bf16* out,
                  i64 out_stride, float* lse, i64 lse_stride, u32 all_rows, const u32* offsets, const u32* anchor,
                  u32 block, u32 window, float scale) {
    extern __shared__ uint4 memory[];
    const int STAGE = KEYS * DIM * 2;
    shared_address q_tile = align_panels(address_of_shared(memory));
    shared_address k_tiles = q_tile + QUERIES * DIM * 2, v_tiles = k_tiles + 2 * STAGE;
    const int WIDE = QUERIES / GROUP;  // query rows of the tile
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv = blockIdx.y;

#if BLOCKS
    int first = blockIdx.x * WIDE, limit = all_rows;
#else
    // The longest rows first, so that the last thread blocks to run are short ones.
    int start = offsets[blockIdx.z], limit = offsets[blockIdx.z + 1];
    int first = start + (gridDim.x - 1 - blockIdx.x) * WIDE;
#endif
    if (first >= limit) return;

    load_queries<QUERIES>(q_tile, q + (i64)kv * GROUP * DIM, q_stride, first, limit);
    copies_commit();

    // Keys of two kinds: of the context, or of the document; and of the blocks.
    int last = earlier(first + WIDE, limit);
#if BLOCKS
    Blocks mask = {offsets, anchor, (int)block, (int)window};
    Span spans[2] = {mask.context(first, last), mask.own(first, last)};
#else
    Span spans[2] = {{start, last, start, first + 1}, {0, 0, 0, 0}};
    if (window) {
        spans[0].begin = later(start, first + 1 - (int)window);
        spans[0].all_begin = later(start, last - (int)window);
    }
#endif
    auto seen_by = [&](int kind, int row) -> Range {
        if (row >= last) return {0, 0};
#if BLOCKS
        return kind ? mask.own(row) : mask.context(row);
#else
        return {window ? later(start, row + 1 - (int)window) : start, row + 1};
#endif
    };
    int tiles = spans[0].tiles(KEYS), all = tiles + (BLOCKS ? spans[1].tiles(KEYS) : 0);
    k += (i64)kv * DIM, v += (i64)kv * DIM;
    if (BLOCKS) own_k += (i64)kv * DIM, own_v += (i64)kv * DIM;

    auto first_key = [&](int j) { return j < tiles ? spans[0].begin + j * KEYS : spans[1].begin + (j - tiles) * KEYS; };
    auto fetch_keys = [&](int j) {
        if (j >= all) return;
        shared_address to = k_tiles + j % 2 * STAGE;
        if (!BLOCKS || j < tiles) load_keys<KEYS>(to, k, k_stride, first_key(j), spans[0].end);
        else load_keys<KEYS>(to, own_k, own_k_stride, first_key(j), spans[1].end);
    };
    auto fetch_values = [&](int j) {
        if (j >= all) return;
        shared_address to = v_tiles + j % 2 * STAGE;
        if (!BLOCKS || j < tiles) load_keys<KEYS>(to, v, v_stride, first_key(j), spans[0].end);
        else load_keys<KEYS>(to, own_v, own_v_stride, first_key(j), spans[1].end);
    };

    float sums[TILES][DIM / 8][4], top[TILES * 2], total[TILES * 2];
    clear(sums);
#pragma unroll
    for (int t = 0; t < TILES * 2; ++t) top[t] = -INFINITE, total[t] = 0.f;
    float factor = scale * LOG2E;

    // Scores of key tile j to probabilities relative to the rows' tops so far; `shrink` is what the sums of
    // earlier tiles must be multiplied by.
    float s[TILES][KEYS / 8][4], shrink[TILES * 2];
    auto soften = [&](int j) {
        int kind = BLOCKS && j >= tiles, key0 = first_key(j);
        if (kind ? spans[1].cuts(key0, KEYS) : spans[0].cuts(key0, KEYS)) {
#pragma unroll
            for (int t = 0; t < TILES * 2; ++t) {
                int r = (warp * TILES + t / 2) * 16 + t % 2 * 8 + lane / 4;
                Range range = seen_by(kind, r / GROUP < WIDE ? first + r / GROUP : last);
#pragma unroll
                for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        int key = key0 + n * 8 + lane % 4 * 2 + i;
                        if (!range.holds(key)) s[t / 2][n][t % 2 * 2 + i] = -INFINITE;
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
            float base = high == -INFINITE ? 0.f : high * factor, sum = 0.f;
            shrink[t] = exp2_fast(top[t] * factor - base);
            top[t] = high;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float p = exp2_fast(s[t / 2][n][t % 2 * 2 + i] * factor - base);
                    s[t / 2][n][t % 2 * 2 + i] = p;
                    sum += p;
                }
            total[t] = total[t] * shrink[t] + sum;
        }
    };

    // The scores of a tile are computed while the values of the one before it are added.
    u32 parts[TILES][KEYS / 16][4];
    if (all) {
        fetch_keys(0);
        copies_commit();
        fetch_values(0);
        fetch_keys(1);
        copies_commit();
        copies_wait<1>();
        publish_tiles();
        __syncthreads();
        start_products(s);
        multiply_tiles<QUERIES, KEYS>(s, q_tile, k_tiles);
        commit_products();
        finish_products<0>(s);
        soften(0);
        to_parts<KEYS>(parts, s);
    }
    for (int j = 0; j < all; ++j) {
        copies_wait<0>();
        publish_tiles();
        __syncthreads();
        fetch_values(j + 1);
        fetch_keys(j + 2);
        copies_commit();
        shared_address v_tile = v_tiles + j % 2 * STAGE;
        if (j + 1 < all) {
            start_products(s, sums);
            multiply_tiles<QUERIES, KEYS>(s, q_tile, k_tiles + (j + 1) % 2 * STAGE);
            commit_products();
            add_product<KEYS>(sums, parts, v_tile);
            commit_products();
            finish_products<1>(s);
            soften(j + 1);
            hold(s);
            finish_products<0>(sums);
#pragma unroll
            for (int t = 0; t < TILES * 2; ++t)
#pragma unroll
                for (int d = 0; d < DIM / 8; ++d)
                    sums[t / 2][d][t % 2 * 2] *= shrink[t], sums[t / 2][d][t % 2 * 2 + 1] *= shrink[t];
            to_parts<KEYS>(parts, s);
        } else {
            start_products(sums);
            add_product<KEYS>(sums, parts, v_tile);
            commit_products();
            finish_products<0>(sums);
        }
    }
    copies_wait<0>();

#pragma unroll
    for (int t = 0; t < TILES * 2; ++t) {
        float sum = total[t];
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        int r = (warp * TILES + t / 2) * 16 + t % 2 * 8 + lane / 4, row = first + r / GROUP;
        if (r / GROUP >= WIDE || row >= limit) continue;
        i64 head = (i64)kv * GROUP + r % GROUP;
        float inverse = sum > 0.f ? 1.f / sum : 0.f;
        bf16* to = out + row * out_stride + head * DIM + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < DIM / 8; ++d)
            *(u32*)(to + d * 8) =
                pack_bf16(sums[t / 2][d][t % 2 * 2] * inverse, sums[t / 2][d][t % 2 * 2 + 1] * inverse);
        if (lse && lane % 4 == 0) lse[row * lse_stride + head] = sum > 0.f ? top[t] * scale + __logf(sum) : -INFINITE;
    }
}
