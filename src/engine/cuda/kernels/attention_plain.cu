// Attention for any head size up to 256: one thread block of WARPS warps for one query row and head (forward
// and the gradient of q) or for one key row and head (the gradients of k and v). A warp takes 32 keys at a
// time, one a lane for the scores, then all lanes together for the sums. No float atomics: every sum has one
// order.

#define WARPS 4
#define MOST 8  // elements of a head that a lane sums: 256 / 32
#define MAX_DIM 256

// Rows of keys and values that a query sees: `begin..end`.
struct Keys {
    const bf16 *k, *v;
    i64 k_stride, v_stride, begin, end;
};

__device__ __forceinline__ bool is_vector(const bf16* p, i64 stride, u32 dim) {
    return dim % 8 == 0 && stride % 8 == 0 && ((unsigned long long)p & 15) == 0;
}

// Dot product of a row in memory with one in shared memory.
__device__ __forceinline__ float dot(const bf16* row, const float* other, u32 dim, bool vector) {
    float sum = 0.f;
    if (vector) {
        for (u32 e = 0; e < dim; e += 8) {
            float x[8];
            load(row + e, x);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += x[i] * other[e + i];
        }
    } else {
        for (u32 e = 0; e < dim; ++e) sum += to_float(row[e]) * other[e];
    }
    return sum;
}

// sums[i] += share[lane j] * rows[first + j][lane + 32 i], over the first `count` lanes.
__device__ __forceinline__ void add_rows(float (&sums)[MOST], float share, const bf16* rows, i64 stride, i64 first,
                                         i64 count, u32 dim) {
    u32 lane = threadIdx.x & 31;
    for (int j = 0; j < count; ++j) {
        float s = __shfl_sync(FULL, share, j);
        if (s == 0.f) continue;
        const bf16* row = rows + (first + j) * stride;
#pragma unroll
        for (int i = 0; i < MOST; ++i)
            if (lane + 32 * i < dim) sums[i] += s * to_float(row[lane + 32 * i]);
    }
}

// A row of a head to shared memory.
__device__ __forceinline__ void fetch(float* to, const bf16* from, u32 dim) {
    for (u32 e = threadIdx.x; e < dim; e += blockDim.x) to[e] = to_float(from[e]);
}

// Everything a warp has seen so far.
struct Running {
    float top, sum, acc[MOST];
};

// Takes in the keys of one range for which `visible(key)`; scores are capped to +-cap where it is not 0.
template <typename Visible>
__device__ void attend(Running& r, const float* q, const Keys& keys, u32 dim, float scale, float cap,
                       Visible visible) {
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    bool vector = is_vector(keys.k, keys.k_stride, dim);
    for (i64 first = keys.begin + 32 * (i64)warp; first < keys.end; first += 32 * WARPS) {
        i64 key = first + lane;
        float score = -INFINITE;
        if (key < keys.end && visible(key)) score = dot(keys.k + key * keys.k_stride, q, dim, vector) * scale;
        if (cap != 0.f && score != -INFINITE) score = cap * tanhf(score / cap);
        float top = fmaxf(r.top, warp_max(score));
        if (top == -INFINITE) continue;
        float shrink = r.top == -INFINITE ? 0.f : __expf(r.top - top);
        float p = score == -INFINITE ? 0.f : __expf(score - top);
        r.top = top;
        r.sum = r.sum * shrink + warp_sum(p);
#pragma unroll
        for (int i = 0; i < MOST; ++i) r.acc[i] *= shrink;
        i64 count = keys.end - first < 32 ? keys.end - first : 32;
        add_rows(r.acc, p, keys.v, keys.v_stride, first, count, dim);
    }
}

// Joins the warps' parts and writes the row; the log-sum-exp too, if wanted. An empty set gives zeros.
__device__ void finish_row(Running& r, u32 dim, bf16* out, float* lse) {
    __shared__ float tops[WARPS], sums[WARPS], parts[WARPS][MAX_DIM];
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (lane == 0) tops[warp] = r.top, sums[warp] = r.sum;
#pragma unroll
    for (int i = 0; i < MOST; ++i) parts[warp][lane + 32 * i] = r.acc[i];
    __syncthreads();
    float top = -INFINITE, sum = 0.f, factor[WARPS];
    for (int i = 0; i < WARPS; ++i) top = fmaxf(top, tops[i]);
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        factor[i] = tops[i] == -INFINITE ? 0.f : __expf(tops[i] - top);
        sum += sums[i] * factor[i];
    }
    for (u32 e = threadIdx.x; e < dim; e += blockDim.x) {
        float y = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) y += parts[i][e] * factor[i];
        out[e] = to_bf16(sum > 0.f ? y / sum : 0.f);
    }
    if (lse && threadIdx.x == 0) *lse = sum > 0.f ? top + __logf(sum) : -INFINITE;
}

__device__ __forceinline__ void start_row(Running& r) {
    r.top = -INFINITE, r.sum = 0.f;
#pragma unroll
    for (int i = 0; i < MOST; ++i) r.acc[i] = 0.f;
}

// The range of `offsets` that holds `row`.
__device__ __forceinline__ u32 find_range(const u32* offsets, u32 ranges, u32 row) {
    u32 low = 0, high = ranges;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (offsets[middle] <= row) low = middle; else high = middle;
    }
    return low;
}

__device__ __forceinline__ i64 later(i64 a, i64 b) { return a > b ? a : b; }

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    causal_plain(const bf16* q, i64 q_stride, const bf16* k, i64 k_stride, const bf16* v, i64 v_stride, bf16* out,
                 i64 out_stride, const u32* offsets, u32 documents, u32 window, u32 group, u32 dim, float scale,
                 float cap) {
    __shared__ float query[MAX_DIM];
    i64 row = blockIdx.x;
    u32 head = blockIdx.y, kv = head / group;
    fetch(query, q + row * q_stride + head * dim, dim);
    __syncthreads();
    i64 start = offsets[find_range(offsets, documents, (u32)row)];
    Keys keys = {k + kv * dim, v + kv * dim, k_stride, v_stride, start, row + 1};
    if (window) keys.begin = later(start, row + 1 - window);
    Running r;
    start_row(r);
    attend(r, query, keys, dim, scale, cap, [](i64) { return true; });
    finish_row(r, dim, out + row * out_stride + head * dim, 0);
}

// `rows` offsets query rows by sequence; `ancestors` has `words` words a row.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    cache_plain(const bf16* q, i64 q_stride, const bf16* k, i64 k_stride, const bf16* v, i64 v_stride, bf16* out,
                i64 out_stride, const u32* rows, u32 sequences, const u32* cache_start, const u32* cached,
                const unsigned long long* ancestors, u32 words, u32 window, const u32* positions, u32 group,
                u32 dim, float scale, float cap) {
    __shared__ float query[MAX_DIM];
    u32 row = blockIdx.x, head = blockIdx.y, kv = head / group;
    fetch(query, q + row * q_stride + head * dim, dim);
    __syncthreads();
    u32 sequence = find_range(rows, sequences, row);
    u32 first = rows[sequence];
    i64 start = cache_start[sequence], fresh = start + cached[sequence];
    i64 oldest = window ? later(0, (i64)positions[row] + 1 - window) : 0;
    Keys keys = {k + kv * dim, v + kv * dim, k_stride, v_stride, start + oldest, fresh};
    Running r;
    start_row(r);
    attend(r, query, keys, dim, scale, cap, [](i64) { return true; });
    keys.begin = fresh, keys.end = fresh + rows[sequence + 1] - first;
    const unsigned long long* mask = ancestors + (i64)row * words;
    attend(r, query, keys, dim, scale, cap, [=](i64 key) {
        u32 j = (u32)(key - fresh);
        return j / 64 < words && (mask[j / 64] >> (j % 64) & 1) && positions[first + j] >= oldest;
    });
    finish_row(r, dim, out + (i64)row * out_stride + head * dim, 0);
}

// What the kernels of DFlash attention share.
struct Block {
    const u32 *context_start, *anchor;
    u32 block, window;

    // Context rows that query row `row` sees.
    __device__ void context(i64 row, i64& begin, i64& end) const {
        i64 n = row / block, a = anchor[n], start = context_start[n], oldest = 0;
        if (window) oldest = later(0, a + row % block + 1 - window);
        begin = start + oldest, end = start + a;
    }
    // Block rows that query row `row` sees.
    __device__ void own(i64 row, i64& begin, i64& end) const {
        begin = row - row % block, end = begin + block;
        if (window) begin = later(begin, row + 1 - window), end = row + 1;
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    block_plain(const bf16* q, i64 q_stride, const bf16* ck, i64 ck_stride, const bf16* cv, i64 cv_stride,
                const bf16* bk, i64 bk_stride, const bf16* bv, i64 bv_stride, bf16* out, i64 out_stride, float* lse,
                i64 lse_stride, const u32* context_start, const u32* anchor, u32 block, u32 window, u32 group,
                u32 dim, float scale) {
    __shared__ float query[MAX_DIM];
    i64 row = blockIdx.x;
    u32 head = blockIdx.y, kv = head / group;
    fetch(query, q + row * q_stride + head * dim, dim);
    __syncthreads();
    Block mask = {context_start, anchor, block, window};
    Keys context = {ck + kv * dim, cv + kv * dim, ck_stride, cv_stride, 0, 0};
    Keys own = {bk + kv * dim, bv + kv * dim, bk_stride, bv_stride, 0, 0};
    mask.context(row, context.begin, context.end);
    mask.own(row, own.begin, own.end);
    Running r;
    start_row(r);
    attend(r, query, context, dim, scale, 0.f, [](i64) { return true; });
    attend(r, query, own, dim, scale, 0.f, [](i64) { return true; });
    finish_row(r, dim, out + row * out_stride + head * dim, lse + row * lse_stride + head);
}

// delta[head][row] = sum of d_out * out over the head. One warp a row and head.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attention_deltas(const bf16* d_out, i64 d_stride, const bf16* out, i64 out_stride, float* delta, i64 rows,
                     u32 heads, u32 dim) {
    i64 at = (i64)blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (at >= rows * heads) return;
    i64 row = at / heads, head = at % heads;
    float sum = 0.f;
    for (u32 e = threadIdx.x & 31; e < dim; e += 32)
        sum += to_float(d_out[row * d_stride + head * dim + e]) * to_float(out[row * out_stride + head * dim + e]);
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) delta[head * rows + row] = sum;
}

// Gradient of q through the keys of one range.
__device__ void pull_back(float (&acc)[MOST], const float* q, const float* d_out, const Keys& keys, u32 dim,
                          float scale, float lse, float delta) {
    u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    bool k_vector = is_vector(keys.k, keys.k_stride, dim), v_vector = is_vector(keys.v, keys.v_stride, dim);
    for (i64 first = keys.begin + 32 * (i64)warp; first < keys.end; first += 32 * WARPS) {
        i64 key = first + lane;
        float ds = 0.f;
        if (key < keys.end) {
            float p = __expf(dot(keys.k + key * keys.k_stride, q, dim, k_vector) * scale - lse);
            ds = p * (dot(keys.v + key * keys.v_stride, d_out, dim, v_vector) - delta) * scale;
        }
        i64 count = keys.end - first < 32 ? keys.end - first : 32;
        add_rows(acc, ds, keys.k, keys.k_stride, first, count, dim);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    block_plain_dq(const bf16* d_out, i64 d_stride, const bf16* q, i64 q_stride, const bf16* ck, i64 ck_stride,
                   const bf16* cv, i64 cv_stride, const bf16* bk, i64 bk_stride, const bf16* bv, i64 bv_stride,
                   const float* lse, i64 lse_stride, const float* delta, bf16* dq, i64 dq_stride, i64 rows,
                   const u32* context_start, const u32* anchor, u32 block, u32 window, u32 group, u32 dim,
                   float scale) {
    __shared__ float query[MAX_DIM], gradient[MAX_DIM], parts[WARPS][MAX_DIM];
    i64 row = blockIdx.x;
    u32 head = blockIdx.y, kv = head / group, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    fetch(query, q + row * q_stride + head * dim, dim);
    fetch(gradient, d_out + row * d_stride + head * dim, dim);
    __syncthreads();
    float l = lse[row * lse_stride + head], d = delta[head * rows + row], acc[MOST];
#pragma unroll
    for (int i = 0; i < MOST; ++i) acc[i] = 0.f;
    Block mask = {context_start, anchor, block, window};
    Keys context = {ck + kv * dim, cv + kv * dim, ck_stride, cv_stride, 0, 0};
    Keys own = {bk + kv * dim, bv + kv * dim, bk_stride, bv_stride, 0, 0};
    mask.context(row, context.begin, context.end);
    mask.own(row, own.begin, own.end);
    pull_back(acc, query, gradient, context, dim, scale, l, d);
    pull_back(acc, query, gradient, own, dim, scale, l, d);
#pragma unroll
    for (int i = 0; i < MOST; ++i) parts[warp][lane + 32 * i] = acc[i];
    __syncthreads();
    for (u32 e = threadIdx.x; e < dim; e += blockDim.x) {
        float y = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) y += parts[i][e];
        dq[row * dq_stride + head * dim + e] = to_bf16(y);
    }
}

// Gradients of one row of keys and values: of the context (`is_own` 0) or of the blocks (1).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    block_plain_dkv(const bf16* d_out, i64 d_stride, const bf16* q, i64 q_stride, const bf16* k, i64 k_stride,
                    const bf16* v, i64 v_stride, const float* lse, i64 lse_stride, const float* delta, bf16* dk,
                    i64 dk_stride, bf16* dv, i64 dv_stride, i64 rows, const u32* context_start, const u32* anchor,
                    u32 block, u32 window, u32 group, u32 dim, float scale, u32 is_own) {
    __shared__ float key[MAX_DIM], value[MAX_DIM], parts[2][WARPS][MAX_DIM];
    i64 row = blockIdx.x;
    u32 kv = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    fetch(key, k + row * k_stride + kv * dim, dim);
    fetch(value, v + row * v_stride + kv * dim, dim);
    __syncthreads();
    float sum_k[MOST], sum_v[MOST];
#pragma unroll
    for (int i = 0; i < MOST; ++i) sum_k[i] = sum_v[i] = 0.f;
    Block mask = {context_start, anchor, block, window};
    bool q_vector = is_vector(q, q_stride, dim), d_vector = is_vector(d_out, d_stride, dim);
    i64 blocks = rows / block, from = is_own ? row / block : 0, to = is_own ? from + 1 : blocks;
    for (i64 n = from + (is_own ? 0 : warp); n < to; n += is_own ? 1 : WARPS) {
        if (!is_own && (row < context_start[n] || row >= (i64)context_start[n] + anchor[n])) continue;
        // Of a block's own keys each warp takes some heads; of context keys a warp takes a whole block.
        for (u32 head = kv * group + (is_own ? warp : 0); head < (kv + 1) * group; head += is_own ? WARPS : 1) {
            for (u32 first = 0; first < block; first += 32) {
                i64 query = n * block + first + lane;
                float p = 0.f, ds = 0.f;
                if (first + lane < block) {
                    i64 begin, end;
                    if (is_own) mask.own(query, begin, end); else mask.context(query, begin, end);
                    if (row >= begin && row < end) {
                        float s = dot(q + query * q_stride + head * dim, key, dim, q_vector) * scale;
                        p = __expf(s - lse[query * lse_stride + head]);
                        float dp = dot(d_out + query * d_stride + head * dim, value, dim, d_vector);
                        ds = p * (dp - delta[head * rows + query]) * scale;
                    }
                }
                i64 count = block - first < 32 ? block - first : 32;
                add_rows(sum_k, ds, q + head * dim, q_stride, n * block + first, count, dim);
                add_rows(sum_v, p, d_out + head * dim, d_stride, n * block + first, count, dim);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) parts[0][warp][lane + 32 * i] = sum_k[i], parts[1][warp][lane + 32 * i] = sum_v[i];
    __syncthreads();
    for (u32 e = threadIdx.x; e < dim; e += blockDim.x) {
        float a = 0.f, b = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) a += parts[0][i][e], b += parts[1][i][e];
        dk[row * dk_stride + kv * dim + e] = to_bf16(a);
        dv[row * dv_stride + kv * dim + e] = to_bf16(b);
    }
}
