// AdamW on float32 masters, and sums of squares in a fixed order.

// One block's share of the sum of squares goes to partial[block].
extern "C" __global__ void square_sums(const float* x, i64 stride, i64 rows, i64 cols, float* partial) {
    __shared__ float space[33];
    i64 all = rows * cols, step = (i64)gridDim.x * blockDim.x;
    i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    // Four sums at once, so that loads overlap.
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    if (stride == cols || rows == 1) {
        for (i64 i = first; i < all; i += 4 * step) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                i64 at = i + j * step;
                float v = at < all ? x[at] : 0.f;
                sum[j] += v * v;
            }
        }
    } else {
        for (i64 i = first; i < all; i += step) {
            float v = x[i / cols * stride + i % cols];
            sum[0] += v * v;
        }
    }
    float total = block_sum((sum[0] + sum[1]) + (sum[2] + sum[3]), space);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// out[0] = sum of partial[0..parts], by one block.
extern "C" __global__ void sum_partial(const float* partial, i64 parts, float* out) {
    __shared__ float space[33];
    float sum = 0.f;
    for (i64 i = threadIdx.x; i < parts; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum, space);
    if (threadIdx.x == 0) out[0] = sum;
}

// correction1 and correction2 are 1 - beta^count; `weight` may be null.
template <int N>
__device__ void adamw(const float* grad, i64 grad_stride, float* master, i64 master_stride, float* m, i64 m_stride,
                      float* v, i64 v_stride, bf16* weight, i64 weight_stride, i64 rows, i64 cols, float grad_scale,
                      float lr, float beta1, float beta2, float eps, float weight_decay, float correction1,
                      float correction2) {
    FOR_EACH(N) {
        float g[N], p[N], a[N], b[N];
        load(grad + row * grad_stride + col, g);
        load(master + row * master_stride + col, p);
        load(m + row * m_stride + col, a);
        load(v + row * v_stride + col, b);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float d = g[i] * grad_scale;
            a[i] = beta1 * a[i] + (1.f - beta1) * d;
            b[i] = beta2 * b[i] + (1.f - beta2) * d * d;
            p[i] -= lr * weight_decay * p[i];
            p[i] -= lr * (a[i] / correction1) / (sqrtf(b[i] / correction2) + eps);
        }
        store(master + row * master_stride + col, p);
        store(m + row * m_stride + col, a);
        store(v + row * v_stride + col, b);
        if (weight) store(weight + row * weight_stride + col, p);
    }
}
BOTH(adamw,
     (const float* grad, i64 grad_stride, float* master, i64 master_stride, float* m, i64 m_stride, float* v,
      i64 v_stride, bf16* weight, i64 weight_stride, i64 rows, i64 cols, float grad_scale, float lr, float beta1,
      float beta2, float eps, float weight_decay, float correction1, float correction2),
     (grad, grad_stride, master, master_stride, m, m_stride, v, v_stride, weight, weight_stride, rows, cols,
      grad_scale, lr, beta1, beta2, eps, weight_decay, correction1, correction2))
