// Loss over a chunk of float32 logits, and the bf16 gradient written over them. One thread block per row.
// The statistics of a row are STATS floats.

#define STATS 8
#define S_LSE 0         // log-sum-exp of the logits
#define S_LSE_T 1       // the same at temperature T
#define S_TEACHER 2     // log-sum-exp of the teacher's logits at temperature T
#define S_CE 3          // cross entropy of the label
#define S_KL 4          // KL(teacher || drafter) at temperature T
#define S_ENTROPY 5     // entropy of the drafter's distribution
#define S_CORRECT 6     // 1 where the most likely token is the label
#define S_WEIGHT 7      // weight of the slot

#define THREADS 512
// Logits are read 8 at a time when rows are aligned (VECTOR 8), else one at a time.
#ifndef VECTOR
#define VECTOR 8
#endif

// exp(a - b) where a <= b, and 0 rather than NaN for two infinities.
__device__ __forceinline__ float shrink(float a, float b) { return a == b ? 1.f : __expf(a - b); }

// What one pass over a row gathers; two parts of a row are combined by `merge`.
struct Gathered {
    float top, sum, moment;   // max, sum of e^(z - max), sum of z e^(z - max)
    float sum_t;              // sum of e^((z - max) / T)
    float teacher_top, teacher_sum, teacher_cross;  // of the teacher at T; sum of e^(..) (zt - z)
    u32 best;                 // lowest index of the max
};

__device__ __forceinline__ Gathered merge(const Gathered& a, const Gathered& b, float inverse_t) {
    Gathered c;
    c.top = fmaxf(a.top, b.top);
    float fa = shrink(a.top, c.top), fb = shrink(b.top, c.top);
    c.sum = a.sum * fa + b.sum * fb;
    c.moment = a.moment * fa + b.moment * fb;
    c.sum_t = a.sum_t * shrink(a.top * inverse_t, c.top * inverse_t) +
              b.sum_t * shrink(b.top * inverse_t, c.top * inverse_t);
    c.teacher_top = fmaxf(a.teacher_top, b.teacher_top);
    float ta = shrink(a.teacher_top * inverse_t, c.teacher_top * inverse_t);
    float tb = shrink(b.teacher_top * inverse_t, c.teacher_top * inverse_t);
    c.teacher_sum = a.teacher_sum * ta + b.teacher_sum * tb;
    c.teacher_cross = a.teacher_cross * ta + b.teacher_cross * tb;
    c.best = a.top > b.top ? a.best : b.top > a.top ? b.best : (a.best < b.best ? a.best : b.best);
    return c;
}

__device__ __forceinline__ Gathered from_lane(const Gathered& a, int step) {
    Gathered b;
    b.top = __shfl_xor_sync(FULL, a.top, step);
    b.sum = __shfl_xor_sync(FULL, a.sum, step);
    b.moment = __shfl_xor_sync(FULL, a.moment, step);
    b.sum_t = __shfl_xor_sync(FULL, a.sum_t, step);
    b.teacher_top = __shfl_xor_sync(FULL, a.teacher_top, step);
    b.teacher_sum = __shfl_xor_sync(FULL, a.teacher_sum, step);
    b.teacher_cross = __shfl_xor_sync(FULL, a.teacher_cross, step);
    b.best = __shfl_xor_sync(FULL, a.best, step);
    return b;
}

// `teacher` may be null. `label` and `correct` are of the chunk's rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    row_statistics(const float* logits, const float* teacher, i64 stride, i64 vocab, const u32* label,
                   float inverse_t, float* stats, u32* correct) {
    __shared__ Gathered parts[THREADS / 32];
    i64 row = blockIdx.x;
    const float* z = logits + row * stride;
    const float* zt = teacher ? teacher + row * stride : 0;
    Gathered g = {-INFINITE, 0.f, 0.f, 0.f, -INFINITE, 0.f, 0.f, FULL};
    for (i64 col = (i64)threadIdx.x * VECTOR; col < vocab; col += THREADS * VECTOR) {
        float v[VECTOR], t[VECTOR], top = -INFINITE;
        load(z + col, v);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) top = fmaxf(top, v[i]);
        if (top > g.top) {
            float f = shrink(g.top, top);
            g.sum *= f, g.moment *= f, g.sum_t *= shrink(g.top * inverse_t, top * inverse_t);
            g.top = top;
#pragma unroll
            for (int i = VECTOR - 1; i >= 0; --i)
                if (v[i] == top) g.best = (u32)col + i;
        }
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            float e = shrink(v[i], g.top);
            g.sum += e;
            g.moment += e * v[i];
        }
        if (zt) {
            load(zt + col, t);
            float teacher_top = -INFINITE;
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) teacher_top = fmaxf(teacher_top, t[i]);
            if (teacher_top > g.teacher_top) {
                float f = shrink(g.teacher_top * inverse_t, teacher_top * inverse_t);
                g.teacher_sum *= f, g.teacher_cross *= f;
                g.teacher_top = teacher_top;
            }
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                g.sum_t += shrink(v[i] * inverse_t, g.top * inverse_t);
                float e = shrink(t[i] * inverse_t, g.teacher_top * inverse_t);
                g.teacher_sum += e;
                g.teacher_cross += e * (t[i] - v[i]);
            }
        }
    }
    for (int step = 16; step; step >>= 1) g = merge(g, from_lane(g, step), inverse_t);
    int warp = threadIdx.x >> 5;
    if ((threadIdx.x & 31) == 0) parts[warp] = g;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < THREADS / 32; ++i) g = merge(g, parts[i], inverse_t);
    float* s = stats + row * STATS;
    float lse = g.top + __logf(g.sum);
    u32 want = label[row];
    float picked = want < vocab ? z[want] : __int_as_float(0x7fc00000);
    s[S_LSE] = lse;
    s[S_CE] = lse - picked;
    s[S_ENTROPY] = lse - g.moment / g.sum;
    s[S_CORRECT] = g.best == want ? 1.f : 0.f;
    correct[row] = g.best == want;
    if (zt) {
        float lse_t = g.top * inverse_t + __logf(g.sum_t);
        float teacher_lse = g.teacher_top * inverse_t + __logf(g.teacher_sum);
        s[S_LSE_T] = lse_t;
        s[S_TEACHER] = teacher_lse;
        s[S_KL] = g.teacher_cross / g.teacher_sum * inverse_t - teacher_lse + lse_t;
    }
}

// Weights of the slots of each block (rows begin[n]..begin[n + 1], less `first`), and their losses.
// `dpace` < 0 turns D-PACE off; `soft` is lambda, 0 without soft labels; `t2` is T squared.
extern "C" __global__ void slot_weights(const u32* begin, u32 blocks, u32 first, const u32* slot, float* stats,
                                        float gamma, float streak, float dpace, float soft, float t2, float cap,
                                        float* losses) {
    u32 n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= blocks) return;
    i64 from = begin[n] - first, to = begin[n + 1] - first;
    // Backward first: D-PACE counts the chances of this slot and all later ones.
    if (dpace >= 0.f) {
        float run = 1.f;
        for (i64 i = from; i < to; ++i) {
            run *= (1.f - dpace) * __expf(-stats[i * STATS + S_CE]) + dpace;
            stats[i * STATS + S_WEIGHT] = run;
        }
        float later = 0.f;
        for (i64 i = to; i-- > from;) stats[i * STATS + S_WEIGHT] = later += stats[i * STATS + S_WEIGHT];
    }
    float run = 1.f;
    for (i64 i = from; i < to; ++i) {
        float* s = stats + i * STATS;
        float w = dpace >= 0.f ? s[S_WEIGHT] : 1.f;
        if (gamma > 0.f) w *= __expf(-(float)(slot[i] - 1) / gamma);
        w *= (1.f - streak) + streak * run;
        run *= __expf(-s[S_CE]);
        float term = (1.f - soft) * s[S_CE];
        if (soft != 0.f) term += soft * t2 * s[S_KL];
        if (cap != 0.f && s[S_CORRECT] != 0.f) term += cap * s[S_ENTROPY];
        s[S_WEIGHT] = w;
        losses[2 * i] = w * term;
        losses[2 * i + 1] = w;
    }
}

// sums[0..2] += the losses and weights of all rows, by one block in a fixed order.
extern "C" __global__ void add_losses(const float* losses, i64 rows, float* sums) {
    __shared__ float space[33];
    float loss = 0.f, weight = 0.f;
    for (i64 i = threadIdx.x; i < rows; i += blockDim.x) loss += losses[2 * i], weight += losses[2 * i + 1];
    loss = block_sum(loss, space);
    weight = block_sum(weight, space);
    if (threadIdx.x == 0) sums[0] += loss, sums[1] += weight;
}

// weight * d(term) / d(logits), over the logits: row r of the gradient begins where row r of the logits does.
extern "C" __global__ void __launch_bounds__(THREADS)
    logit_gradient(float* logits, const float* teacher, i64 stride, i64 vocab, const u32* label, float inverse_t,
                   float soft, float cap, const float* stats) {
    i64 row = blockIdx.x;
    const float* s = stats + row * STATS;
    const float* z = logits + row * stride;
    const float* zt = teacher ? teacher + row * stride : 0;
    bf16* gradient = (bf16*)(logits + row * stride);
    float w = s[S_WEIGHT], lse = s[S_LSE], entropy = s[S_ENTROPY];
    float lse_t = zt ? s[S_LSE_T] : 0.f, teacher_lse = zt ? s[S_TEACHER] : 0.f;
    // d(T^2 KL) / dz = T (softmax(z / T) - teacher)
    float hard = w * (1.f - soft), kl = zt ? w * soft / inverse_t : 0.f;
    float spread = s[S_CORRECT] != 0.f ? w * cap : 0.f;
    u32 want = label[row];
    for (i64 first = 0; first < vocab; first += THREADS * VECTOR) {
        i64 col = first + (i64)threadIdx.x * VECTOR;
        float v[VECTOR], t[VECTOR];
        if (col < vocab) {
            load(z + col, v);
            if (zt) load(zt + col, t);
        }
        // What this round writes lies over logits of this round or earlier ones.
        __syncthreads();
        if (col >= vocab) continue;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            float log_q = v[i] - lse, q = __expf(log_q);
            float d = hard * (q - (col + i == want ? 1.f : 0.f));
            if (zt) d += kl * (__expf(v[i] * inverse_t - lse_t) - __expf(t[i] * inverse_t - teacher_lse));
            // The entropy's slope; where q is 0 so is q log q, whatever the logarithm.
            if (spread != 0.f && q > 0.f) d -= spread * q * (log_q + entropy);
            v[i] = d;
        }
        store(gradient + col, v);
    }
}

// The k most likely tokens of each row of float32 logits, best first, the lower id first in a tie: the next
// is the greatest of those that come after the last one in that order.
extern "C" __global__ void __launch_bounds__(THREADS)
    top_tokens(const float* logits, i64 vocab, u32 k, u32* ids, i64 ids_stride, float* log_probs, i64 log_stride) {
    __shared__ float values[THREADS / 32], space[33];
    __shared__ u32 indices[THREADS / 32];
    const float* z = logits + (i64)blockIdx.x * vocab;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float last = INFINITE, lse = 0.f;
    u32 last_index = 0;
    for (u32 rank = 0; rank < k; ++rank) {
        float best = -INFINITE;
        u32 index = FULL;
        for (i64 i = threadIdx.x; i < vocab; i += THREADS) {
            float v = z[i];
            bool after = rank == 0 || v < last || (v == last && (u32)i > last_index);
            if (after && (v > best || index == FULL)) best = v, index = (u32)i;
        }
        for (int step = 16; step; step >>= 1) {
            float v = __shfl_xor_sync(FULL, best, step);
            u32 i = __shfl_xor_sync(FULL, index, step);
            if (i != FULL && (index == FULL || v > best || (v == best && i < index))) best = v, index = i;
        }
        if (lane == 0) values[warp] = best, indices[warp] = index;
        __syncthreads();
        best = values[0], index = indices[0];
        for (int i = 1; i < THREADS / 32; ++i)
            if (indices[i] != FULL &&
                (index == FULL || values[i] > best || (values[i] == best && indices[i] < index)))
                best = values[i], index = indices[i];
        __syncthreads();
        if (rank == 0) {
            float sum = 0.f;
            for (i64 i = threadIdx.x; i < vocab; i += THREADS) sum += shrink(z[i], best);
            lse = best + __logf(block_sum(sum, space));
        }
        if (threadIdx.x == 0) {
            ids[blockIdx.x * ids_stride + rank] = index;
            log_probs[blockIdx.x * log_stride + rank] = best - lse;
        }
        last = best, last_index = index;
    }
}

// The Gumbel variable of a token: output `id` of SplitMix64 seeded with `key`, its upper half as u in (0, 1), and
// -ln(-ln(1 - u)).
__device__ __forceinline__ float gumbel(unsigned long long key, u32 id) {
    unsigned long long z = key + ((unsigned long long)id + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    float u = ((float)(u32)(z >> 32) + 0.5f) * 2.3283064365386963e-10f;
    return -logf(-log1pf(-u));
}

// One token for each row of float32 logits: without keys (null) the most likely, the lowest id in a tie; else the
// largest logit / T + Gumbel variable of the row's key, two words, low first; logits are capped first if cap > 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    choose_token(const float* logits, i64 vocab, float cap, float inverse_t, const u32* keys, u32* ids) {
    __shared__ float values[THREADS / 32];
    __shared__ u32 indices[THREADS / 32];
    const float* z = logits + (i64)blockIdx.x * vocab;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    unsigned long long key = 0;
    if (keys) key = (unsigned long long)keys[2 * blockIdx.x + 1] << 32 | keys[2 * blockIdx.x];
    float best = -INFINITE;
    u32 index = FULL;
    for (i64 i = threadIdx.x; i < vocab; i += THREADS) {
        float v = z[i];
        if (keys) {
            if (cap > 0.f) v = cap * tanhf(v / cap);
            v = v * inverse_t + gumbel(key, (u32)i);
        }
        if (v > best || index == FULL) best = v, index = (u32)i;
    }
    for (int step = 16; step; step >>= 1) {
        float v = __shfl_xor_sync(FULL, best, step);
        u32 i = __shfl_xor_sync(FULL, index, step);
        if (i != FULL && (index == FULL || v > best || (v == best && i < index))) best = v, index = i;
    }
    if (lane == 0) values[warp] = best, indices[warp] = index;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < THREADS / 32; ++i)
        if (indices[i] != FULL && (index == FULL || values[i] > best || (values[i] == best && indices[i] < index)))
            best = values[i], index = indices[i];
    ids[blockIdx.x] = index;
}
