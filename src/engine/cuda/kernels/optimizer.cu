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

// correction1 and correction2 are 1 - beta^count.
extern "C" __global__ void adamw(const float* grad, float* master, float* m, float* v, bf16* weight, i64 count,
                                 float grad_scale, float lr, float beta1, float beta2, float eps,
                                 float weight_decay, float correction1, float correction2) {
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        float g = grad[i] * grad_scale, p = master[i];
        float a = m[i] = beta1 * m[i] + (1.f - beta1) * g;
        float b = v[i] = beta2 * v[i] + (1.f - beta2) * g * g;
        p -= lr * weight_decay * p;
        p -= lr * (a / correction1) / (sqrtf(b / correction2) + eps);
        master[i] = p;
        if (weight) weight[i] = to_bf16(p);
    }
}
