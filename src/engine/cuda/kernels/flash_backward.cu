// Gradients of DFlash attention on tensor cores (arXiv 2307.08691). Scores are computed twice, once for the
// queries' gradient and once for the keys', so that each sum has one owner and one order: no atomics.

// ---- Gradient of the queries: one thread block for QUERIES tile rows, KEYS keys at a time, three stages.

#define QUERIES (WARPS * 16)

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    flash_dq(const bf16* d_out, i64 d_stride, const bf16* q, i64 q_stride, const bf16* k, i64 k_stride,
             const bf16* v, i64 v_stride, const bf16* own_k, i64 own_k_stride, const bf16* own_v, i64 own_v_stride,
             const float* lse, i64 lse_stride, const float* delta, bf16* dq, i64 dq_stride, u32 all_rows,
             const u32* context_start, const u32* anchor, u32 block, u32 window, float scale) {
    extern __shared__ uint4 memory[];
    shared_address q_tile = align_panels(address_of_shared(memory));
    shared_address d_tile = q_tile + QUERIES * DIM * 2, key_tiles = d_tile + QUERIES * DIM * 2;
    const int STAGES = 3, STAGE = 2 * KEYS * DIM * 2;  // keys, then values
    const int WIDE = QUERIES / GROUP;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv = blockIdx.y;
    int first = blockIdx.x * WIDE, limit = all_rows;

    load_queries<QUERIES>(q_tile, q + (i64)kv * GROUP * DIM, q_stride, first, limit);
    load_queries<QUERIES>(d_tile, d_out + (i64)kv * GROUP * DIM, d_stride, first, limit);
    copies_commit();

    // Keys of two kinds: of the context and of the blocks.
    int last = earlier(first + WIDE, limit);
    Blocks mask = {context_start, anchor, (int)block, (int)window};
    Span spans[2] = {mask.context(first, last), mask.own(first, last)};
    int tiles = spans[0].tiles(KEYS), all = tiles + spans[1].tiles(KEYS), rows[2];
    float base[2], shift[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        int r = warp * 16 + t * 8 + lane / 4;
        rows[t] = r / GROUP < WIDE ? first + r / GROUP : last;
        bool valid = rows[t] < last;
        i64 head = (i64)kv * GROUP + r % GROUP;
        float l = valid ? lse[rows[t] * lse_stride + head] : -INFINITE;
        // A row that sees nothing gets probability 0 everywhere.
        base[t] = l == -INFINITE ? INFINITE : l * LOG2E;
        shift[t] = valid ? delta[head * all_rows + rows[t]] : 0.f;
    }
    k += (i64)kv * DIM, v += (i64)kv * DIM, own_k += (i64)kv * DIM, own_v += (i64)kv * DIM;

    auto first_key = [&](int j) { return j < tiles ? spans[0].begin + j * KEYS : spans[1].begin + (j - tiles) * KEYS; };
    auto fetch = [&](int j) {
        if (j >= all) return;
        shared_address to = key_tiles + j % STAGES * STAGE;
        if (j < tiles) {
            load_keys<KEYS>(to, k, k_stride, first_key(j), spans[0].end);
            load_keys<KEYS>(to + STAGE / 2, v, v_stride, first_key(j), spans[0].end);
        } else {
            load_keys<KEYS>(to, own_k, own_k_stride, first_key(j), spans[1].end);
            load_keys<KEYS>(to + STAGE / 2, own_v, own_v_stride, first_key(j), spans[1].end);
        }
    };

    float sums[1][DIM / 8][4];
    clear(sums);
    float factor = scale * LOG2E;
    float s[1][KEYS / 8][4], dp[1][KEYS / 8][4];
    // s = gradient of the scores of key tile j.
    auto slope = [&](int j) {
        int key0 = first_key(j);
        bool cut = j < tiles ? spans[0].cuts(key0, KEYS) : spans[1].cuts(key0, KEYS);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            Range range = {0, 0};
            if (cut && rows[t] < last) range = j < tiles ? mask.context(rows[t]) : mask.own(rows[t]);
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int key = key0 + n * 8 + lane % 4 * 2 + i, at = t * 2 + i;
                    float p = exp2_fast(s[0][n][at] * factor - base[t]);
                    if (cut && !range.holds(key)) p = 0.f;
                    s[0][n][at] = p * (dp[0][n][at] - shift[t]);
                }
        }
    };
    auto multiply = [&](int j) {
        shared_address k_tile = key_tiles + j % STAGES * STAGE;
        multiply_tiles<QUERIES, KEYS>(s, q_tile, k_tile);
        multiply_tiles<QUERIES, KEYS>(dp, d_tile, k_tile + STAGE / 2);
        commit_products();
    };

    // The scores of a tile are computed while the gradient through the one before it is added.
    u32 parts[1][KEYS / 16][4];
    if (all) {
        fetch(0);
        copies_commit();
        fetch(1);
        copies_commit();
        copies_wait<1>();
        publish_tiles();
        __syncthreads();
        start_products(s, dp);
        multiply(0);
        finish_products<0>(s, dp);
        slope(0);
        to_parts<KEYS>(parts, s);
    }
    for (int j = 0; j < all; ++j) {
        copies_wait<0>();
        publish_tiles();
        __syncthreads();
        fetch(j + 2);
        copies_commit();
        shared_address k_tile = key_tiles + j % STAGES * STAGE;
        if (j + 1 < all) {
            start_products(s, dp, sums);
            multiply(j + 1);
            add_product<KEYS>(sums, parts, k_tile);
            commit_products();
            finish_products<1>(s, dp);
            slope(j + 1);
            hold(s);
            finish_products<0>(sums);
            to_parts<KEYS>(parts, s);
        } else {
            start_products(sums);
            add_product<KEYS>(sums, parts, k_tile);
            commit_products();
            finish_products<0>(sums);
        }
    }
    copies_wait<0>();
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        if (rows[t] >= last) continue;
        i64 head = (i64)kv * GROUP + (warp * 16 + t * 8 + lane / 4) % GROUP;
        bf16* to = dq + rows[t] * dq_stride + head * DIM + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < DIM / 8; ++d)
            *(u32*)(to + d * 8) = pack_bf16(sums[0][d][t * 2] * scale, sums[0][d][t * 2 + 1] * scale);
    }
}

// ---- Gradients of keys and values: one thread block for WARPS x 16 key rows of the context or, past
// `context_tiles`, of the blocks; BATCH tile rows of queries at a time, two stages.

#define KEY_ROWS (WARPS * 16)

// What a tile row of queries needs beside its matrices, 16 bytes to be read at once.
struct __align__(16) About {
    float base, shift;
    Range seen;
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    flash_dkv(const bf16* d_out, i64 d_stride, const bf16* q, i64 q_stride, const bf16* k, i64 k_stride,
              const bf16* v, i64 v_stride, const bf16* own_k, i64 own_k_stride, const bf16* own_v, i64 own_v_stride,
              const float* lse, i64 lse_stride, const float* delta, bf16* dk, i64 dk_stride, bf16* dv,
              i64 dv_stride, bf16* own_dk, i64 own_dk_stride, bf16* own_dv, i64 own_dv_stride, u32 context_rows,
              u32 context_tiles, u32 all_rows, const u32* context_start, const u32* anchor, u32 block, u32 window,
              float scale) {
    extern __shared__ uint4 memory[];
    __shared__ About queries[2][BATCH];
    __shared__ int blocks[2], cut_at[2];
    const int STAGE = 2 * BATCH * DIM * 2;  // queries, then gradients of the output
    const int WIDE = BATCH / GROUP;
    shared_address k_tile = align_panels(address_of_shared(memory)), v_tile = k_tile + KEY_ROWS * DIM * 2;
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

    Blocks mask = {context_start, anchor, (int)block, (int)window};
    // The blocks that see any of these keys: their query rows are first..last.
    int key_end = key0 + KEY_ROWS < key_limit ? key0 + KEY_ROWS : key_limit, first, last;
    if (is_own) {
        first = key0 / (int)block * block;
        last = (key_end + (int)block - 1) / (int)block * block;
    } else {
        if (threadIdx.x == 0) blocks[0] = 0x7fffffff, blocks[1] = 0;
        __syncthreads();
        for (int n = threadIdx.x; n < (int)(all_rows / block); n += THREADS) {
            Range range = mask.context_of(n, 0);
            if (range.begin < key_end && range.end > key0) atomicMin(&blocks[0], n), atomicMax(&blocks[1], n + 1);
        }
        __syncthreads();
        first = blocks[1] ? blocks[0] * block : 0;
        last = blocks[1] * block;
    }
    q += (i64)kv * GROUP * DIM, d_out += (i64)kv * GROUP * DIM;

    auto fetch = [&](int row0, int stage) {
        shared_address to = stages + stage * STAGE;
        load_queries<BATCH>(to, q, q_stride, row0, last);
        load_queries<BATCH>(to + STAGE / 2, d_out, d_stride, row0, last);
        for (int r = threadIdx.x; r < BATCH; r += THREADS) {
            int row = row0 + r / GROUP;
            About about = {INFINITE, 0.f, {0, 0}};
            if (r / GROUP < WIDE && row < last) {
                i64 head = (i64)kv * GROUP + r % GROUP;
                float l = lse[row * lse_stride + head];
                if (l != -INFINITE) about.base = l * LOG2E;
                about.shift = delta[head * all_rows + row];
                about.seen = is_own ? mask.own(row) : mask.context(row);
            }
            queries[stage][r] = about;
            // Any thread says so, with the same word, and a stage's word tells its rounds apart.
            if (about.seen.begin > key0 || about.seen.end < key_end) cut_at[stage] = row0;
        }
    };

    float sum_k[1][DIM / 8][4], sum_v[1][DIM / 8][4];
    clear(sum_k);
    clear(sum_v);
    float factor = scale * LOG2E;
    if (threadIdx.x < 2) cut_at[threadIdx.x] = -1;
    __syncthreads();
    if (first < last) fetch(first, 0);
    copies_commit();
    int stage = 0;
    for (int row0 = first; row0 < last; row0 += WIDE, stage ^= 1) {
        if (row0 + WIDE < last) fetch(row0 + WIDE, stage ^ 1);
        copies_commit();
        copies_wait<1>();
        publish_tiles();
        __syncthreads();
        shared_address q_tile = stages + stage * STAGE, d_tile = q_tile + STAGE / 2;
        bool cut = cut_at[stage] == row0;

        // Scores with keys as rows and queries as columns.
        float s[1][BATCH / 8][4], dp[1][BATCH / 8][4];
        start_products(s, dp);
        multiply_tiles<KEY_ROWS, BATCH>(s, k_tile, q_tile);
        multiply_tiles<KEY_ROWS, BATCH>(dp, v_tile, d_tile);
        commit_products();
        finish_products<0>(s, dp);
#pragma unroll
        for (int n = 0; n < BATCH / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                About about = queries[stage][n * 8 + lane % 4 * 2 + c];
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    int key = key0 + warp * 16 + t * 8 + lane / 4, at = t * 2 + c;
                    float p = exp2_fast(s[0][n][at] * factor - about.base);
                    if (cut && !about.seen.holds(key)) p = 0.f;
                    s[0][n][at] = p;
                    dp[0][n][at] = p * (dp[0][n][at] - about.shift);
                }
            }
        u32 p_parts[1][BATCH / 16][4], ds_parts[1][BATCH / 16][4];
        to_parts<BATCH>(p_parts, s);
        to_parts<BATCH>(ds_parts, dp);
        start_products(sum_v, sum_k);
        add_product<BATCH>(sum_v, p_parts, d_tile);
        add_product<BATCH>(sum_k, ds_parts, q_tile);
        commit_products();
        finish_products<0>(sum_v, sum_k);
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
            *(u32*)(to_k + d * 8) = pack_bf16(sum_k[0][d][t * 2] * scale, sum_k[0][d][t * 2 + 1] * scale);
            *(u32*)(to_v + d * 8) = pack_bf16(sum_v[0][d][t * 2], sum_v[0][d][t * 2 + 1]);
        }
    }
}
