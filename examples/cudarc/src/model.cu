// Softmax regression in bf16: 64 pixels from 0 to 16, 10 digits. An image is 65 bytes, the last one its digit.

__device__ float widened(unsigned short bits) { return __uint_as_float((unsigned int)bits << 16); }

// For each image the loss, and its derivatives by the logits.
extern "C" __global__ void forward(const unsigned short* weight, const unsigned short* bias,
                                   const unsigned char* images, float* errors, float* losses, int length) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= length) return;
    const unsigned char* image = images + 65 * i;
    float logits[10], sum = 0;
    for (int digit = 0; digit < 10; digit++) {
        logits[digit] = widened(bias[digit]);
        for (int p = 0; p < 64; p++) logits[digit] += widened(weight[64 * digit + p]) * image[p] / 16;
        sum += expf(logits[digit]);
    }
    for (int digit = 0; digit < 10; digit++)
        errors[10 * i + digit] = (expf(logits[digit]) / sum - (digit == image[64])) / length;
    losses[i] = logf(sum) - logits[image[64]];
}

// A block for each digit, with a thread for each pixel and one for the bias.
extern "C" __global__ void backward(const float* errors, const unsigned char* images, float* weight, float* bias,
                                    int length) {
    int digit = blockIdx.x, p = threadIdx.x;
    float sum = 0;
    for (int i = 0; i < length; i++) sum += errors[10 * i + digit] * (p < 64 ? images[65 * i + p] / 16.0f : 1);
    (p < 64 ? weight[64 * digit + p] : bias[digit]) = sum;
}

// The sum of the squares of both gradients, by one thread.
extern "C" __global__ void square(const float* weight, const float* bias, double* sum) {
    *sum = 0;
    for (int i = 0; i < 640; i++) *sum += (double)weight[i] * weight[i];
    for (int i = 0; i < 10; i++) *sum += (double)bias[i] * bias[i];
}
